"""The two factors of a product with many rows: their references against the whole matrix."""

import pytest
import torch
from samples import RATES, random_input, random_weight

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.ops.reference import matrix_product as reference


def float64_product(x, weight, codebook):
    return x.double() @ ops.reconstruct(*weight[:3], codebook).double()


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_the_factors_give_the_product_of_the_whole_matrix(bits, codebook):
    weight = random_weight(384, 256, bits)
    x = random_input(5, 384)
    rows = reference.rotate_input(x, weight.suh)
    columns = reference.reconstruct_columns(*weight[:3], codebook.id)
    assert rows.dtype == columns.dtype == torch.float16
    exact = float64_product(x, weight, codebook)
    assert (rows.double() @ columns.double() - exact).norm() / exact.norm() < 5e-4


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 300.0])
def test_float16_holds_the_factors_whatever_the_scale_of_the_weight(scale):
    weight = random_weight(256, 128)
    weight = weight._replace(suh=(weight.suh.sign() * scale).half())
    x = random_input(7, 256)
    rows = reference.rotate_input(x, weight.suh)
    columns = reference.reconstruct_columns(*weight[:3], 2)
    exact = float64_product(x, weight, Codebook.MUL1)
    assert (rows.double() @ columns.double() - exact).norm() / exact.norm() < 5e-4


@pytest.mark.parametrize(
    ("largest", "power"),
    [(0.0, 1), (0.5, 1), (0.51, 1), (1.0, 2), (-3.0, 4), (2.0**-24, 2.0**-23), (65504.0, 65536)],
)
def test_the_power_of_two_lies_above_the_largest_scale(largest, power):
    suh = torch.tensor([0.0, largest, largest / 2]).half()
    assert float(reference.power_above(suh)) == power


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_scales_that_are_not_finite_change_no_power(value):
    assert float(reference.power_above(torch.tensor([0.25, value]).half())) == 1
