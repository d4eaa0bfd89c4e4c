"""The packed linear against an exact product with the reconstructed weight."""

import pytest
import torch
from samples import RATES, native_only, random_input, random_weight, relative_error
from test_codec_ops import isa  # noqa: F401  (a fixture)

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.ops.reference import codec as reference


def exact_product(x, weight, codebook, bias=True):
    matrix = reference.reconstruct(*weight[:3], codebook.id, torch.float32)
    y = x.double() @ matrix.double()
    return y + weight.bias.double() if bias else y


@pytest.mark.parametrize(("bits", "codebook"), RATES)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_rate_and_codebook_gives_the_exact_product(isa, bits, codebook, rows):  # noqa: F811
    weight = random_weight(256, 128, bits)
    x = random_input(rows, 256)
    ours = ops.exl3_linear(x, *weight, codebook)
    # Float32 throughout: the reference product in float32 errs by 5e-7.
    assert relative_error(ours, exact_product(x, weight, codebook)) < 1.5e-6


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 15, 16, 17, 95, 96, 97, 144, 193])
def test_any_number_of_rows(isa, rows):  # noqa: F811
    weight = random_weight(384, 256)
    x = random_input(rows, 384)
    ours = ops.exl3_linear(x, *weight, Codebook.MUL1)
    assert relative_error(ours, exact_product(x, weight, Codebook.MUL1)) < 1.5e-6


@pytest.mark.parametrize(("k", "n"), [(128, 128), (128, 640), (640, 128), (1152, 256)])
def test_edge_shapes(isa, k, n):  # noqa: F811
    weight = random_weight(k, n, 3)
    x = random_input(2, k)
    ours = ops.exl3_linear(x, *weight, Codebook.MCG)
    assert relative_error(ours, exact_product(x, weight, Codebook.MCG)) < 1.5e-6


@native_only
def test_a_row_does_not_depend_on_the_other_rows_or_on_the_threads():
    weight = random_weight(256, 512)
    x = random_input(130, 256)
    torch.set_num_threads(1)
    every = ops.exl3_linear(x, *weight, Codebook.MUL1)
    torch.set_num_threads(2)
    assert torch.equal(ops.exl3_linear(x, *weight, Codebook.MUL1), every)
    for row in (0, 5, 97, 129):
        assert torch.equal(ops.exl3_linear(x[row], *weight, Codebook.MUL1), every[row])


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (0, 256), (2, 0, 256)])
def test_leading_dimensions_are_kept(shape):
    weight = random_weight()
    y = ops.exl3_linear(random_input(*shape), *weight, Codebook.MUL1)
    assert y.shape == (*shape[:-1], 128)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_computed_in_float32_and_rounded_once(dtype):
    weight = random_weight()
    x = random_input(5, 256).to(dtype)
    wide = ops.exl3_linear(x.float(), *weight, Codebook.MUL1)
    assert torch.equal(ops.exl3_linear(x, *weight, Codebook.MUL1), wide.to(dtype))
    assert torch.equal(ops.exl3_linear(x, *weight, Codebook.MUL1, torch.float32), wide)


@native_only
def test_non_contiguous_input_and_scales():
    weight = random_weight()
    x = random_input(256, 6).T
    suh = torch.stack([weight.suh, weight.suh], 1)[:, 0]
    ours = ops.exl3_linear(x, weight.trellis, suh, *weight[2:], Codebook.MUL1)
    assert torch.equal(ours, ops.exl3_linear(x.contiguous(), *weight, Codebook.MUL1))


@native_only
def test_a_slice_of_columns_gives_those_columns():
    weight = random_weight(256, 384, 5)
    x = random_input(3, 256)
    whole = ops.exl3_linear(x, *weight, Codebook.MUL1)
    part = ops.exl3_linear(
        x, weight.trellis[:, 8:24], weight.suh, weight.svh[128:], weight.bias[128:], Codebook.MUL1
    )
    assert torch.equal(part, whole[:, 128:])


def test_a_column_of_zero_scale_is_exactly_its_bias():
    weight = random_weight()
    weight.svh[7] = 0
    y = ops.exl3_linear(random_input(3, 256), *weight, Codebook.MUL1)
    assert torch.equal(y[:, 7], weight.bias[7].float().expand(3))


def test_a_group_is_its_members_one_by_one():
    members = [random_weight(256, n, bits, seed=n) for n, bits in ((384, 4), (128, 6), (128, 2.5))]
    books = [Codebook.MCG, Codebook.INST3, Codebook.MUL1]
    x = random_input(2, 256)
    trellis, suh, svh = ([member[i] for member in members] for i in range(3))
    together = ops.exl3_linear_group(x, trellis, suh, svh, books)
    for result, member, book in zip(together, members, books, strict=True):
        assert torch.equal(result, ops.exl3_linear(x, *member[:3], None, book))
