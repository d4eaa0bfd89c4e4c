"""Accumulation, merging, damping and the fallback decision."""

from __future__ import annotations

import pytest
import torch
from quant_material import correlated_rows

from exllamav3.errors import FormatError
from exllamav3.quant import HessianAccumulator, make_hessian
from exllamav3.quant.randomness import Stream, random_signs


def accumulate(*batches: torch.Tensor, width: int = 128) -> HessianAccumulator:
    accumulator = HessianAccumulator(width, "cpu")
    for batch in batches:
        accumulator.add(batch)
    return accumulator


def test_the_matrix_is_the_mean_of_outer_products():
    x = correlated_rows(300, 128, seed=0)
    hessian = accumulate(x[:100].view(2, 50, 128), x[100:]).finish(seed=0)
    exact = x.double().T @ x.double() / 300
    assert hessian.count == 300
    assert not hessian.fallback
    torch.testing.assert_close(hessian.matrix.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(hessian.matrix, hessian.matrix.T)


def test_half_precision_rows_are_summed_in_float32():
    # 3000 ones: float16 sums would stop at 2048.
    hessian = accumulate(torch.ones(3000, 128, dtype=torch.float16)).finish(seed=0)
    assert hessian.matrix[0, 0] == 1.0


@pytest.mark.cuda
@pytest.mark.parametrize("width", [128, 96])
def test_half_precision_rows_on_a_gpu_are_summed_in_float32(width):
    """Products of float16 are exact; what remains is the rounding of float32 sums."""
    x = (correlated_rows(5000, width, seed=4) * 30).half()
    x[17, 5] = float("inf")
    on_gpu = HessianAccumulator(128, "cuda")
    for part in x.cuda().view(5, 1000, width):
        on_gpu.add(part)
    hessian = on_gpu.finish(seed=0)
    rows = torch.cat([x[:17], x[18:]]).double()
    exact = rows.T @ rows / len(rows)
    assert hessian.count == len(rows)
    found = hessian.matrix.cpu().double()
    assert float((found[:width, :width] - exact).norm() / exact.norm()) < 1e-5
    assert not found[width:].any()
    assert not found[:, width:].any()


def test_narrow_rows_are_zero_extended():
    x = correlated_rows(50, 96, seed=1)
    hessian = accumulate(x).finish(seed=0)
    torch.testing.assert_close(hessian.matrix[:96, :96], x.T @ x / 50)
    assert not hessian.matrix[96:].any()
    assert not hessian.matrix[:, 96:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_with_a_non_finite_value_are_left_out(bad):
    x = correlated_rows(40, 128, seed=2)
    spoiled = x.clone()
    spoiled[7, 3] = bad
    kept = torch.cat([x[:7], x[8:]])
    hessian = accumulate(spoiled).finish(seed=0)
    assert hessian.count == 39
    torch.testing.assert_close(hessian.matrix, accumulate(kept).finish(seed=0).matrix)


def test_merging_equals_accumulating_everything_in_one_place():
    x = correlated_rows(64, 128, seed=3)
    first, second = accumulate(x[:20]), accumulate(x[20:])
    first.merge(second)
    together = accumulate(x).finish(seed=0)
    merged = first.finish(seed=0)
    assert merged.count == 64
    torch.testing.assert_close(merged.matrix, together.matrix)


def test_damping_is_a_share_of_the_mean_diagonal():
    hessian = make_hessian(torch.diag(torch.arange(128.0)), count=1, seed=0, sigma_reg=0.1)
    assert float(hessian.damping()) == pytest.approx(0.1 * 63.5)
    assert torch.equal(hessian.matrix, torch.diag(torch.arange(128.0)))  # stays undamped


@pytest.mark.parametrize(
    ("matrix", "count"),
    [
        (torch.eye(128), 0),
        (torch.zeros(128, 128), 5),
        (torch.eye(128) * 1e-21, 5),
        (torch.full((128, 128), float("nan")), 5),
        (torch.eye(128).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(torch.inf)), 5),
    ],
    ids=["no rows", "zero", "too small", "nan", "one infinity off the diagonal"],
)
def test_an_unusable_matrix_asks_for_the_fallback(matrix, count):
    assert make_hessian(matrix, count, seed=0).fallback


def test_signs_depend_on_the_seed_alone():
    first = make_hessian(torch.eye(256), 1, seed=5).signs_K
    again = make_hessian(torch.eye(256) * 3, 9, seed=5).signs_K
    other = make_hessian(torch.eye(256), 1, seed=6).signs_K
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.abs().eq(1).all()


def test_signs_are_balanced_and_differ_between_purposes():
    inputs = random_signs(10000, 1, Stream.INPUT_SIGNS)
    outputs = random_signs(10000, 1, Stream.OUTPUT_SIGNS)
    for signs in (inputs, outputs, inputs * outputs):
        assert abs(float(signs.mean())) < 0.05  # 5 sigma


def test_overflowing_sums_ask_for_the_fallback():
    assert accumulate(torch.full((2, 128), 3e38)).finish(seed=0).fallback


@pytest.mark.parametrize(
    "x", [torch.ones(4, 129), torch.ones(4, 128, dtype=torch.int32), torch.tensor(1.0)]
)
def test_activations_that_do_not_fit_are_refused(x):
    with pytest.raises(FormatError, match="width from 1 to 128"):
        accumulate(x)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(FormatError, match="multiple of 128"):
        HessianAccumulator(100, "cpu")
    with pytest.raises(FormatError, match="cannot merge a sum over 256 channels into one over 128"):
        accumulate().merge(HessianAccumulator(256, "cpu"))
    with pytest.raises(FormatError, match="multiple of 128"):
        make_hessian(torch.eye(64), 1, seed=0)
