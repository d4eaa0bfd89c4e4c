"""The packed linear on a GPU against float64, a float16 product, and itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.ops.matrix_product import PACKED_ROWS
from exllamav3.ops.reference import codec as reference
from exllamav3.util.rates import HALF_BITS, INTEGER_BITS

pytestmark = pytest.mark.cuda

RATES = [(bits, book) for bits in INTEGER_BITS for book in Codebook]
RATES += [(bits, Codebook.MUL1) for bits in HALF_BITS]
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 256]
"""Both sides of every edge between kernels and between groups of rows."""


def random_weight(k: int, n: int, bits: float, seed: int = 0, device="cuda") -> list[Tensor]:
    """trellis, suh, svh, bias of a random packed weight."""
    generator = torch.Generator().manual_seed(seed)
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16)
    scales = [torch.randn(size, generator=generator).half() for size in (k, n, n)]
    return [tensor.to(device) for tensor in (trellis, *scales)]


def random_input(rows: int, k: int, dtype=torch.float16, seed: int = 1, device="cuda") -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """Relative Frobenius error."""
    return float((found.double() - exact).norm() / exact.norm())


def assert_as_good_as_float16(x, weight, codebook, out_dtype=torch.float16) -> None:
    """err(ours) <= 2 err(float16 product with the decoded weight) + 1e-4, against float64."""
    trellis, suh, svh, bias = weight
    matrix = reference.reconstruct(trellis.cpu(), suh.cpu(), svh.cpu(), codebook.id, torch.float32)
    exact = x.double() @ matrix.cuda().double() + bias.double()
    plain = (x.half() @ matrix.cuda().half()).double() + bias.double()
    ours = ops.exl3_linear(x, *weight, codebook, out_dtype)
    assert ours.dtype == out_dtype
    assert ours.is_contiguous()
    assert error(ours, exact) <= 2 * error(plain, exact) + 1e-4


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_every_rate_and_codebook_in_every_row_class(bits, codebook):
    weight = random_weight(640, 384, bits)
    for rows in (1, 2, 5, 16, 24, 100):
        assert_as_good_as_float16(random_input(rows, 640), weight, codebook)


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows, codebook):
    assert_as_good_as_float16(random_input(rows, 384), random_weight(384, 256, 4), codebook)


@pytest.mark.parametrize("rows", [97, 145, 200, 256])
def test_the_packed_kernel_itself_takes_any_number_of_rows(rows):
    trellis, suh, svh, bias = random_weight(384, 256, 4)
    x = random_input(rows, 384)
    found = torch.ops.exllamav3.linear(x, trellis, suh, svh, bias, 2, torch.float16)
    matrix = reference.reconstruct(trellis.cpu(), suh.cpu(), svh.cpu(), 2, torch.float32).cuda()
    exact = x.double() @ matrix.double() + bias.double()
    plain = (x @ matrix.half()).double() + bias.double()
    assert error(found, exact) <= 2 * error(plain, exact) + 1e-4


@pytest.mark.parametrize(
    ("k", "n"), [(128, 128), (128, 1152), (1152, 128), (896, 640), (5120, 1024), (2048, 8320)]
)
@pytest.mark.parametrize("rows", [1, 4, 13, 40])
def test_edge_shapes(k, n, rows):
    assert_as_good_as_float16(random_input(rows, k), random_weight(k, n, 3), Codebook.MUL1)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 20, 80])
def test_dtypes_of_input_and_output(rows, dtype, out_dtype):
    weight = random_weight(256, 256, 5)
    x = random_input(rows, 256, dtype)
    for codebook in (Codebook.MUL1, Codebook.MCG):
        ours = ops.exl3_linear(x, *weight, codebook, out_dtype)
        exact = ops.exl3_linear(x.cpu().float(), *(t.cpu() for t in weight), codebook)
        # one rounding of the output dtype on top of float16 arithmetic
        assert error(ours.cpu(), exact.double()) < (4e-3 if out_dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_a_large_mean_of_the_transformed_input_does_not_cancel_badly(rows):
    # One channel of each block drives 128 transformed channels of one sign: sum(input) is as large
    # as it can be, and with it the offset of mul1 that has to cancel.
    weight = random_weight(1024, 256, 4)
    x = random_input(rows, 1024) * 1e-3
    x[:, ::128] = 8
    assert_as_good_as_float16(x, weight, Codebook.MUL1, torch.float32)


@pytest.mark.parametrize("rows", [1, 2])
def test_an_outlier_channel_leaves_the_error_where_it_was(rows):
    weight = random_weight(1024, 256, 4)
    x = random_input(rows, 1024)
    x[:, 300] = 2000
    assert_as_good_as_float16(x, weight, Codebook.MUL1, torch.float32)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("rows", [1, 3, 20, 80])
def test_non_finite_input_stays_visible_and_in_its_row(rows, value):
    weight = random_weight(256, 128, 4)
    x = random_input(rows, 256)
    x[0, 5] = value
    y = ops.exl3_linear(x, *weight, Codebook.MUL1)
    assert not y[0].isfinite().any()
    assert y[1:].isfinite().all()


def test_zero_input_gives_the_bias():
    weight = random_weight(256, 128, 4)
    y = ops.exl3_linear(torch.zeros(2, 256, device="cuda").half(), *weight, Codebook.MUL1)
    assert torch.equal(y, weight[3].expand(2, -1))


@pytest.mark.parametrize("rows", [1, 7, 16, 64])
def test_results_repeat_bit_for_bit(rows):
    weight = random_weight(5120, 1024, 4)
    x = random_input(rows, 5120)
    first = ops.exl3_linear(x, *weight, Codebook.MUL1)
    for _ in range(20):
        assert torch.equal(ops.exl3_linear(x, *weight, Codebook.MUL1), first)


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 30, 64])
def test_a_group_is_its_members_bit_for_bit(rows):
    members = [
        (random_weight(1280, n, bits, seed=n), book)
        for n, bits, book in (
            (1024, 4, Codebook.MUL1), (256, 6, Codebook.MCG), (384, 3.5, Codebook.MUL1),
            (128, 3, Codebook.INST3),
        )
    ]  # fmt: skip
    x = random_input(rows, 1280)
    trellis, suh, svh = ([weight[i] for weight, _ in members] for i in range(3))
    together = ops.exl3_linear_group(x, trellis, suh, svh, [book for _, book in members])
    for result, (weight, book) in zip(together, members, strict=True):
        assert torch.equal(result, ops.exl3_linear(x, *weight[:3], None, book))


def test_a_slice_of_columns_gives_those_columns():
    trellis, suh, svh, bias = random_weight(256, 384, 5)
    for rows in (1, 12, 40, 100):
        x = random_input(rows, 256)
        part = ops.exl3_linear(
            x, trellis[:, 8:24], suh, svh[128:], bias[128:], Codebook.MUL1, torch.float32
        )
        whole = ops.exl3_linear(x, trellis, suh, svh, bias, Codebook.MUL1, torch.float32)
        assert error(part, whole[:, 128:].double()) < 1e-5


@pytest.mark.parametrize("rows", [1, 3, PACKED_ROWS])
def test_a_linear_and_a_group_are_one_kernel_each(rows):
    weight = random_weight(512, 256, 4)
    x = random_input(rows, 512)
    group = [[tensor, tensor] for tensor in weight[:3]]

    def kernels(function) -> list[str]:
        function()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function()
            torch.cuda.synchronize()
        cuda = torch.profiler.DeviceType.CUDA
        return [event.name for event in profile.events() if event.device_type == cuda]

    assert len(kernels(lambda: ops.exl3_linear(x, *weight, Codebook.MUL1))) == 1
    assert len(kernels(lambda: ops.exl3_linear_group(x, *group, [2, 1]))) == 1


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_graph_capture_without_warm_up_on_the_capturing_stream(rows):
    weight = random_weight(1024, 512, 4)
    x = random_input(rows, 1024)
    expected = ops.exl3_linear(x, *weight, Codebook.MUL1)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = ops.exl3_linear(x, *weight, Codebook.MUL1)
    for scale in (1, 2):
        x.copy_(random_input(rows, 1024) * scale)
        graph.replay()
        assert torch.equal(y, ops.exl3_linear(x, *weight, Codebook.MUL1))
    assert scale == 2
    assert not torch.equal(y, expected)


def test_nothing_is_allocated_after_warm_up():
    weight = random_weight(1024, 512, 4)
    x = random_input(4, 1024)
    for _ in range(2):
        y = ops.exl3_linear(x, *weight, Codebook.MUL1)
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(10):
        y = ops.exl3_linear(x, *weight, Codebook.MUL1)
    assert y.shape == (4, 512)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_streams_at_once_do_not_disturb_each_other():
    weights = [random_weight(2048, 1024, 4, seed=i) for i in range(4)]
    x = random_input(3, 2048)
    expected = [ops.exl3_linear(x, *weight, Codebook.MUL1) for weight in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    for _ in range(30):
        results = []
        for stream, weight in zip(streams, weights, strict=True):
            with torch.cuda.stream(stream):
                results.append(ops.exl3_linear(x, *weight, Codebook.MUL1))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.two_gpus
def test_a_device_that_is_not_the_current_one():
    weight = random_weight(512, 256, 4)
    x = random_input(3, 512)
    there = ops.exl3_linear(x.to("cuda:1"), *(t.to("cuda:1") for t in weight), Codebook.MUL1)
    assert there.device == torch.device("cuda:1")
    assert torch.equal(there.cpu(), ops.exl3_linear(x, *weight, Codebook.MUL1).cpu())


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256), (0, 256), (2, 0, 256)])
def test_leading_dimensions_are_kept(shape):
    weight = random_weight(256, 128, 4)
    y = ops.exl3_linear(torch.zeros(shape, device="cuda").half(), *weight, Codebook.MUL1)
    assert y.shape == (*shape[:-1], 128)
