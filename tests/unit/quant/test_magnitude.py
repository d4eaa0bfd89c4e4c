"""Weights far from 1, and float16 scales."""

from __future__ import annotations

import pytest
import torch

from exllamav3.errors import FormatError
from exllamav3.quant.magnitude import largest_magnitude, normalize, to_stored_scales


def product(suh, svh):
    return suh.double()[:, None] * svh.double()


SU = torch.tensor([0.02, -0.013, 0.5, 0.004])
SV = torch.tensor([1.0, -0.7, 2.2])


def test_ordinary_scales_are_rounded_and_not_moved():
    suh, svh = to_stored_scales(SU, SV, 0)
    assert torch.equal(suh, SU.half())
    assert torch.equal(svh, SV.half())


@pytest.mark.parametrize("exponent", [-18, -16, -12, 16, 19])
def test_tiny_and_huge_scales_are_spread_over_both_sides(exponent):
    suh, svh = to_stored_scales(SU, SV, exponent)
    exact = product(SU, SV) * 2.0**exponent
    torch.testing.assert_close(product(suh, svh), exact, rtol=2.0**-10, atol=0)
    assert suh.isfinite().all()
    assert svh.isfinite().all()


@pytest.mark.parametrize("exponent", [-60, 60])
def test_scales_beyond_both_sides_are_refused(exponent):
    with pytest.raises(FormatError, match="do not fit float16"):
        to_stored_scales(SU, SV, exponent)


def test_zeros_stay_zeros_and_do_not_count_as_small():
    suh, svh = to_stored_scales(torch.tensor([0.0, 0.02]), torch.tensor([1.0, 0.0]), 0)
    assert torch.equal(suh, torch.tensor([0.0, 0.02]).half())
    assert torch.equal(svh, torch.tensor([1.0, 0.0]).half())


def test_a_single_tiny_channel_may_lose_bits_but_does_not_spoil_the_others():
    su = torch.tensor([1e-13, 0.02, 0.03])
    suh, svh = to_stored_scales(su, SV, 0)
    exact = product(su, SV)
    torch.testing.assert_close(product(suh, svh)[1:], exact[1:], rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_weight_is_named_by_its_position(bad):
    weight = torch.zeros(128, 256)
    weight[17, 200] = bad
    with pytest.raises(FormatError, match=r"first is -?(nan|inf) at input 17, output 200"):
        largest_magnitude(weight)


def test_the_largest_magnitude_looks_at_both_signs():
    assert largest_magnitude(torch.tensor([[1.0, -3.0]]).to(torch.bfloat16)) == 3.0


def test_ordinary_weights_are_not_copied():
    weight = torch.randn(128, 128)
    same, exponent = normalize(weight, 4.0)
    assert same is weight
    assert exponent == 0


@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e12, 1e37])
def test_extreme_weights_are_moved_near_one_exactly(size):
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * size
    moved, exponent = normalize(weight, float(weight.abs().max()))
    assert 0.5 <= float(moved.abs().max()) <= 8  # float32 cannot undo the largest exponents
    torch.testing.assert_close(moved.double() * 2.0**exponent, weight.double(), rtol=0, atol=0)
