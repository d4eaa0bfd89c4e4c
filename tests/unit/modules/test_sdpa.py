import pytest
import torch
from tiny_models import relative_error

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.sdpa import Backend, attend


def exact(q, k, v, visible):
    """Attention in float64, one head at a time; visible is bool (b, s, t)."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        scores = q[:, :, head] @ k[:, :, head // group].transpose(1, 2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[:, :, head] = weights @ v[:, :, head // group]
    return out


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1)])
def test_causal_attention_for_every_head_size_and_group_ratio(head_dim, heads, kv_heads):
    q = torch.randn(2, 7, heads, head_dim)
    k, v = torch.randn(2, 2, 7, kv_heads, head_dim)
    visible = torch.ones(7, 7, dtype=torch.bool).tril().expand(2, 7, 7)
    y = attend(q, k, v, ForwardContext.uncached(2, 7))
    assert relative_error(y, exact(q, k, v, visible)) < 1e-5


def test_a_query_sees_keys_up_to_its_own_position_in_every_row():
    positions = torch.tensor([[3, 4], [0, 1]])
    q = torch.randn(2, 2, 4, 16)
    k, v = torch.randn(2, 2, 6, 2, 16)
    y = attend(q, k, v, ForwardContext(positions=positions, cache=object()))
    visible = torch.arange(6) <= positions[:, :, None]
    assert relative_error(y, exact(q, k, v, visible)) < 1e-5


def backend(takes_strided, seen):
    def run(q, k, v, ctx):
        seen.append((k.is_contiguous(), v.is_contiguous()))
        return q

    return Backend("test", run, lambda q, k, ctx: True, takes_strided)


@pytest.mark.parametrize("takes_strided", [True, False])
def test_a_strided_view_is_copied_only_for_a_backend_that_cannot_take_it(takes_strided):
    q = torch.randn(2, 5, 2, 8)
    fused = torch.randn(2, 5, 2 * 8 + 8 + 8)
    k, v = fused[..., 16:24].unflatten(-1, (1, 8)), fused[..., 24:].unflatten(-1, (1, 8))
    seen = []
    attend(q, k, v, ForwardContext.uncached(2, 5), (backend(takes_strided, seen),))
    assert seen == [(not takes_strided, not takes_strided)]


def test_the_first_backend_that_accepts_is_used():
    seen = []
    refusing = Backend("no", lambda *a: pytest.fail("not to be run"), lambda q, k, ctx: False, True)
    q, k, v = torch.randn(3, 1, 2, 1, 8)
    attend(q, k, v, ForwardContext.uncached(1, 2), (refusing, backend(True, seen)))
    assert len(seen) == 1
