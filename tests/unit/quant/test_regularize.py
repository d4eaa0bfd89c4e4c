"""Scales, signs, rotations and their inverse."""

from __future__ import annotations

import pytest
import torch
from quant_material import correlated_rows, uneven_weight

from exllamav3.quant import make_hessian
from exllamav3.quant.randomness import Stream, random_signs
from exllamav3.quant.regularize import REGULAR_STD, regularize
from exllamav3.quant.rotation import hadamard_matrix, rotate_columns, rotate_rows

EVERYTHING = slice(0, None)


def make(weight, out_scales=True, seed=0):
    k = weight.shape[0]
    x = correlated_rows(600, k, seed)
    hessian = make_hessian(x.T @ x / 600, 600, seed)
    return regularize(weight, hessian, hessian.signs_K, out_scales, seed), hessian


def inverse(regular, scales):
    return scales.su_K[:, None] * rotate_rows(rotate_columns(regular)) * scales.sv_N


def test_the_rotation_is_orthonormal_and_its_own_inverse():
    matrix = hadamard_matrix(torch.device("cpu")).double()
    torch.testing.assert_close(matrix @ matrix, torch.eye(128).double(), rtol=0, atol=1e-6)
    assert torch.equal(matrix, matrix.T)
    x = uneven_weight(256, 128, seed=1)
    torch.testing.assert_close(rotate_rows(rotate_rows(x)), x, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(rotate_columns(rotate_columns(x)), x, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("out_scales", [True, False])
def test_the_inverse_gives_the_weight_back(out_scales):
    weight = uneven_weight(256, 384, seed=0)
    scales, _ = make(weight, out_scales)
    regular = scales.forward(weight, EVERYTHING)
    error = (inverse(regular, scales) - weight).norm() / weight.norm()
    assert error < 1e-6


def test_every_block_comes_out_with_the_same_energy():
    weight = uneven_weight(256, 384, seed=0)
    weight[:128] *= 7  # blocks that differ as a whole
    weight[:, 128:256] *= 0.1
    scales, _ = make(weight)
    regular = scales.forward(weight, EVERYTHING)
    rows = regular.reshape(2, 128, 384).square().mean(dim=(1, 2)).sqrt()
    columns = regular.reshape(256, 3, 128).square().mean(dim=(0, 2)).sqrt()
    torch.testing.assert_close(rows, torch.full((2,), REGULAR_STD), rtol=1e-4, atol=0)
    torch.testing.assert_close(columns, torch.full((3,), REGULAR_STD), rtol=0.01, atol=0)
    kurtosis = (regular / regular.std()).pow(4).mean()
    assert abs(float(kurtosis) - 3) < 0.2  # Gaussian


def test_column_ranges_agree_with_the_whole():
    weight = uneven_weight(128, 384, seed=2)
    scales, _ = make(weight)
    whole = scales.forward(weight, EVERYTHING)
    part = scales.forward(weight, slice(128, 256))
    torch.testing.assert_close(part, whole[:, 128:256])


def test_without_output_scales_only_signs_are_applied_to_outputs():
    weight = uneven_weight(128, 256, seed=3)
    scales, _ = make(weight, out_scales=False)
    assert torch.equal(scales.sv_N, random_signs(256, 0, Stream.OUTPUT_SIGNS))


def test_the_metric_measures_the_error_of_the_regularised_weight():
    weight = uneven_weight(256, 128, seed=4)
    scales, hessian = make(weight, out_scales=False)
    error = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    original = inverse(error, scales).double()
    damped = hessian.matrix.double() + float(hessian.damping()) * torch.eye(256)
    exact = torch.trace(original.T @ damped @ original)
    measured = torch.trace(error.T @ scales.metric(hessian) @ error)
    # |sv| = 1, so rotating the outputs does not change the trace.
    assert float(measured) == pytest.approx(float(exact), rel=1e-5)


def test_zero_rows_and_columns_are_found_and_do_not_disturb_the_others():
    weight = uneven_weight(256, 256, seed=5)
    weight[200:] = 0
    weight[:, 100:128] = 0
    scales, hessian = make(weight)
    assert torch.equal(scales.zero_rows_K, torch.arange(256) >= 200)
    assert torch.equal(
        scales.zero_columns_N, (torch.arange(256) >= 100) & (torch.arange(256) < 128)
    )
    regular = scales.forward(weight, EVERYTHING)
    assert regular.isfinite().all()
    rows = regular.reshape(2, 128, 256).square().mean(dim=(1, 2)).sqrt()
    torch.testing.assert_close(rows, torch.full((2,), REGULAR_STD), rtol=1e-4, atol=0)
    # Only damping weighs the empty rows.
    energy = rotate_rows(rotate_columns(scales.metric(hessian))).diagonal()
    expected = scales.su_K[200:].square() * hessian.damping()
    torch.testing.assert_close(energy[200:], expected, rtol=1e-3, atol=1e-9)


def test_a_whole_block_of_zeros_is_harmless():
    weight = uneven_weight(256, 256, seed=6)
    weight[128:] = 0
    weight[:, :128] = 0
    scales, _ = make(weight)
    regular = scales.forward(weight, EVERYTHING)
    assert regular.isfinite().all()
    assert not regular[128:].any()
    assert not regular[:, :128].any()
