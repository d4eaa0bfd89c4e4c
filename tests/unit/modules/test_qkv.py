"""Split and fused projections against a float64 decode of what is stored."""

import pytest
import torch
from qkv_material import (
    GATED,
    KEY,
    PLAIN,
    REAL,
    cut,
    decoded,
    make_attention,
    projection,
    stored,
)
from tiny_models import relative_error

import exllamav3.modules.qkv as qkv_module
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.module import DictSource
from exllamav3.modules.qkv import FusedQkv, QkvGeometry, SplitQkv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("geometry", [GATED, PLAIN], ids=["gated", "plain"])
def test_either_route_is_as_exact_as_a_float16_product(geometry, fused, dtype):
    qkv = projection(geometry, fused, dtype)
    x = torch.randn(2, 5, geometry.hidden_size, generator=torch.Generator().manual_seed(1))
    x = x.to(dtype)
    weight, bias = decoded(qkv)
    expected = cut(x.double() @ weight + bias, geometry)
    baseline = cut((x.half() @ weight.half()).double() + bias, geometry)
    found = qkv.project(x, ForwardContext.uncached(2, 5))
    for ours, half, true in zip(found, baseline, expected, strict=True):
        if true is None:
            assert ours is None
            continue
        assert ours.shape == true.shape
        assert ours.dtype == dtype
        assert relative_error(ours, true) <= 2 * relative_error(half, true) + 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_each_pass_is_counted_under_the_route_it_took(fused):
    attention = make_attention(GATED, fused)
    ctx = ForwardContext.uncached(1, 2)
    for _ in range(3):
        attention.forward(torch.randn(1, 2, GATED.hidden_size), ctx)
    assert attention.routes == {"fused" if fused else "split": 3}


def test_split_projections_take_the_grouped_launch_on_a_gpu_unless_told_not_to(device):
    attention = make_attention(GATED, False, device=device)
    ctx = ForwardContext.uncached(1, 2, device)
    x = torch.randn(1, 2, GATED.hidden_size, device=device)
    attention.forward(x, ctx)
    assert attention.routes == {"split" if device == "cpu" else "grouped": 1}
    attention.set_qkv_route("split")
    attention.forward(x, ctx)
    assert attention.routes["split"] == (2 if device == "cpu" else 1)


def test_an_unknown_route_is_refused():
    for fused in (False, True):
        with pytest.raises(FormatError, match="qkv_route is 'fused', expected one of auto, split"):
            make_attention(GATED, fused).set_qkv_route("fused")


def test_a_fused_block_has_one_child_in_place_of_three():
    split = [m.key for m in make_attention(GATED, False).modules]
    fused = [m.key for m in make_attention(GATED, True).modules]
    assert split[:3] == [f"{KEY}.q_proj", f"{KEY}.k_proj", f"{KEY}.v_proj"]
    assert fused[:1] == [f"{KEY}.qkv_proj"]
    assert split[3:] == fused[1:]


def test_the_fused_linear_keeps_the_input_label_of_its_components():
    split, fused = SplitQkv(KEY, GATED), FusedQkv(KEY, GATED)
    assert {linear.qmap for linear in (*split.linears, *fused.linears)} == {"block.attn.input"}
    assert fused.qkv_proj.out_features == sum(GATED.output_splits)


def test_a_fused_block_never_falls_back_to_split_tensors():
    qkv = FusedQkv(KEY, GATED)
    with pytest.raises(FormatError, match="qkv_proj"):
        qkv.qkv_proj.load(DictSource(stored(GATED, fused=False)), "cpu")


def test_values_and_keys_of_a_fused_pass_are_views():
    qkv = projection(GATED, fused=True, dtype=torch.float16)
    ctx = ForwardContext.uncached(2, 4)
    _, k, v, _ = qkv.project(torch.randn(2, 4, GATED.hidden_size).half(), ctx)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert not v.is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_of_real_geometry_in_float16(fused, device, monkeypatch):
    """24 query heads, 4 key/value heads, head size 256, gated: the widths of Qwen3.5-27B."""
    seen = []
    fast = qkv_module.deinterleave_qg

    def watch(qg, head_dim):
        seen.append((qg.dtype, qg.shape, qg.is_contiguous(), head_dim))
        q, gate = fast(qg, head_dim)
        seen.append((q.shape, gate.shape))
        return q, gate

    monkeypatch.setattr(qkv_module, "deinterleave_qg", watch)
    assert REAL.output_splits == (12288, 1024, 1024)
    attention = make_attention(REAL, fused, torch.float16, device)
    x = torch.randn(2, 3, REAL.hidden_size, generator=torch.Generator().manual_seed(2)).half()
    y = attention.forward(x.to(device), ForwardContext.uncached(2, 3, device))
    assert seen == [
        (torch.float16, (2, 3, 12288), True, 256),
        ((2, 3, 24, 256), (2, 3, 6144)),
    ]
    assert y.shape == (2, 3, REAL.hidden_size)
    assert y.dtype == torch.float32
    wide = make_attention(REAL, fused, torch.float32)
    expected = wide.forward(x.float(), ForwardContext.uncached(2, 3))
    assert relative_error(y, expected) < 5e-3  # float16 activations


@pytest.mark.parametrize(
    ("dtype", "head_dim", "fast"),
    [(torch.float16, 64, True), (torch.float16, 20, False), (torch.float32, 64, False)],
)
def test_the_fast_op_serves_float16_with_heads_of_whole_vectors(dtype, head_dim, fast, monkeypatch):
    geometry = QkvGeometry(128, heads=2, kv_heads=1, head_dim=head_dim, gated=True)
    calls = []
    real = qkv_module.deinterleave_qg
    monkeypatch.setattr(
        qkv_module, "deinterleave_qg", lambda *args: calls.append(args) or real(*args)
    )
    qkv = projection(geometry, fused=True, dtype=dtype)
    qkv.project(torch.randn(1, 2, 128).to(dtype), ForwardContext.uncached(1, 2))
    assert bool(calls) == fast
