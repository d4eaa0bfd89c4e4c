"""The gated delta rule and attention on a GPU against their references."""

import pytest
import torch
from samples import random_delta_inputs, relative_error

from exllamav3 import ops
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.sdpa import BACKENDS, attend
from exllamav3.ops.reference.delta_rule import gated_delta_rule as reference

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "tokens": 1, "k_heads": 16, "v_heads": 48, "dk": 128, "dv": 128},
        {"batch": 2, "tokens": 7, "k_heads": 2, "v_heads": 4},
        {"batch": 3, "tokens": 65, "k_heads": 2, "v_heads": 6, "dk": 64, "dv": 64},
        {"batch": 1, "tokens": 3, "k_heads": 3, "v_heads": 3, "dk": 5, "dv": 7},
        {"batch": 1, "tokens": 4, "k_heads": 1, "v_heads": 2, "dk": 256, "dv": 100},
        {"batch": 2, "tokens": 33, "k_heads": 2, "v_heads": 4, "dk": 132, "dv": 130},
        {"batch": 1, "tokens": 50, "k_heads": 2, "v_heads": 4, "dk": 24, "dv": 16},
        {"batch": 2, "tokens": 1, "k_heads": 1, "v_heads": 2, "dk": 30, "dv": 21},
    ],
)
def test_delta_rule_is_the_reference_up_to_rounding(sizes, dtype):
    inputs = random_delta_inputs(**sizes)
    inputs = [t.to(dtype) for t in inputs[:3]] + list(inputs[3:])
    out, state = ops.gated_delta_rule(*(t.cuda() for t in inputs))
    expected_out, expected_state = reference(
        *(t.double() if n < 3 else t for n, t in enumerate(inputs))
    )
    assert out.dtype == dtype
    assert relative_error(out.cpu(), expected_out) < (2e-6 if dtype == torch.float32 else 1e-3)
    assert relative_error(state.cpu(), expected_state) < 2e-6


def test_delta_rule_in_pieces_is_the_whole_bit_for_bit():
    inputs = [t.cuda() for t in random_delta_inputs(tokens=39)]
    out, state = ops.gated_delta_rule(*inputs)
    first_out, middle = ops.gated_delta_rule(*(t[:, :4] for t in inputs[:5]), inputs[5])
    one_out, middle = ops.gated_delta_rule(*(t[:, 4:5] for t in inputs[:5]), middle)
    rest_out, end = ops.gated_delta_rule(*(t[:, 5:] for t in inputs[:5]), middle)
    assert torch.equal(torch.cat([first_out, one_out, rest_out], 1), out)
    assert torch.equal(end, state)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (24, 4)])
@pytest.mark.parametrize("new", [1, 5, 100])
def test_cached_attention_of_rows_of_unequal_length(head_dim, heads, kv_heads, new):
    random = torch.Generator("cuda").manual_seed(0)
    past = torch.tensor([700, 3, 250], device="cuda")
    total = 800

    def normal(*shape):
        return torch.randn(shape, generator=random, device="cuda").half()

    q = normal(3, new, heads, head_dim)
    k, v = normal(3, total, kv_heads, head_dim), normal(3, total, kv_heads, head_dim)
    positions = past[:, None] + torch.arange(new, device="cuda")
    ctx = ForwardContext(positions=positions, cache=object())
    assert BACKENDS[0].accepts(q, k, ctx)
    y = attend(q, k, v, ctx)
    expected = attend(q.double(), k.double(), v.double(), ctx, BACKENDS[-1:])
    assert relative_error(y, expected) < 1e-3
