"""Split, grouped and fused q/k/v projections on a GPU: launches, exactness, memory."""

import pytest
import torch
from qkv_material import GATED, PLAIN, cut, decoded, make_attention
from qkv_material import projection as loaded_projection
from tiny_models import relative_error
from torch.profiler import ProfilerActivity, profile

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.qkv import QkvGeometry
from exllamav3.ops.matrix_product import PACKED_ROWS

pytestmark = pytest.mark.cuda

REAL = QkvGeometry(5120, heads=24, kv_heads=4, head_dim=256, gated=True)
"""A full-attention block of Qwen3.5-27B."""


def projection(geometry, fused, route="auto"):
    qkv = loaded_projection(geometry, fused, torch.float16, "cuda")
    if not fused:
        qkv.route = route
    return qkv


def activations(rows, geometry, seed=1):
    x = torch.randn(rows, 1, geometry.hidden_size, generator=torch.Generator().manual_seed(seed))
    return x.half().cuda()


def kernels(function):
    """Names of the kernels that a call launches."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memcpy", "Memset"))]


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize(
    ("fused", "route", "launches"), [(False, "split", 3), (False, "auto", 1), (True, "auto", 1)]
)
def test_launches_of_a_block_in_decode(rows, fused, route, launches):
    qkv = projection(REAL, fused, route)
    x = activations(rows, REAL)
    ctx = ForwardContext.uncached(rows, 1, "cuda")
    names = kernels(lambda: qkv.project(x, ctx))
    linear = [name for name in names if "linear_kernel" in name]
    assert len(linear) == launches, names
    # Beside them one kernel separates q from its gate, after a copy where q is part of a wider row.
    assert len(names) - launches == (2 if fused and rows > 1 else 1), names
    assert qkv.routes == {"fused" if fused else "grouped" if route == "auto" else "split": 2}


def test_more_rows_than_one_launch_takes_go_the_way_of_three_linears():
    qkv = projection(GATED, fused=False)
    rows = PACKED_ROWS + 1
    qkv.project(activations(rows, GATED), ForwardContext.uncached(rows, 1, "cuda"))
    assert qkv.routes == {"split": 1}


def test_a_bias_goes_the_way_of_three_linears():
    qkv = projection(PLAIN, fused=False)
    qkv.project(activations(1, PLAIN), ForwardContext.uncached(1, 1, "cuda"))
    assert qkv.routes == {"split": 1}


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64])
def test_the_grouped_launch_gives_the_bits_of_three(rows):
    x = activations(rows, REAL)
    ctx = ForwardContext.uncached(rows, 1, "cuda")
    for one, other in zip(
        projection(REAL, False, "auto").project(x, ctx),
        projection(REAL, False, "split").project(x, ctx),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
@pytest.mark.parametrize("route", ["split", "auto", "fused"])
@pytest.mark.parametrize("geometry", [REAL, GATED, PLAIN], ids=["real", "small", "plain"])
def test_every_route_is_as_exact_as_a_float16_product(geometry, route, rows):
    qkv = projection(geometry, route == "fused", route)
    x = activations(rows, geometry)
    weight, bias = decoded_on_gpu(qkv)
    expected = cut(x.double() @ weight + bias, geometry)
    baseline = cut((x @ weight.half()).double() + bias, geometry)
    found = qkv.project(x, ForwardContext.uncached(rows, 1, "cuda"))
    for ours, half, true in zip(found, baseline, expected, strict=True):
        if true is None:
            assert ours is None
            continue
        assert ours.shape == true.shape
        assert relative_error(ours, true) <= 2 * relative_error(half, true) + 1e-4


def decoded_on_gpu(qkv):
    if qkv.geometry.hidden_size < 1000:
        return tuple(t.cuda() for t in decoded(qkv))
    weights = [linear.weight.reconstruct(torch.float32).double() for linear in qkv.linears]
    return torch.cat(weights, 1), torch.zeros(sum(qkv.geometry.output_splits), device="cuda")


@pytest.mark.parametrize("fused", [False, True])
def test_decode_never_holds_a_decoded_matrix(fused):
    attention = make_attention(REAL, fused, torch.float16, "cuda")
    ctx = ForwardContext.uncached(4, 1, "cuda")
    x = activations(4, REAL)
    attention.forward(x, ctx)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.forward(x, ctx)
    # q, k and v in float16 are 147 MB; what is needed is partial sums and a few rows.
    assert torch.cuda.max_memory_allocated() - before < 8e6


def test_only_the_query_part_of_a_fused_row_is_copied():
    qkv = projection(REAL, fused=True)
    x = activations(8, REAL)
    _, k, v, _ = qkv.project(x, ForwardContext.uncached(8, 1, "cuda"))
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.stride(0) == v.stride(0) == sum(REAL.output_splits)
