"""Separating queries and gates."""

import pytest
import torch

from exllamav3 import ops
from exllamav3.errors import FormatError


@pytest.mark.parametrize(
    ("b", "s", "heads", "head_dim"), [(1, 1, 1, 1), (2, 3, 4, 8), (1, 5, 24, 256), (0, 2, 2, 4)]
)
def test_each_head_gives_a_query_and_a_gate(b, s, heads, head_dim):
    qg = torch.randn(b, s, heads * 2 * head_dim).half()
    q, gate = ops.deinterleave_qg(qg, head_dim)
    assert q.shape == (b, s, heads, head_dim)
    assert gate.shape == (b, s, heads * head_dim)
    assert q.is_contiguous()
    assert gate.is_contiguous()
    for head in range(heads):
        lanes = qg[..., 2 * head * head_dim : 2 * (head + 1) * head_dim]
        assert torch.equal(q[:, :, head], lanes[..., :head_dim])
        assert torch.equal(
            gate[..., head * head_dim : (head + 1) * head_dim], lanes[..., head_dim:]
        )


def test_the_reference_serves_any_dtype_and_layout():
    qg = torch.randn(16, 3, 2).permute(2, 1, 0)
    q, gate = ops.deinterleave_qg_reference(qg, 4)
    expected_q, expected_gate = ops.deinterleave_qg(qg.half().contiguous(), 4)
    assert torch.equal(q.half(), expected_q)
    assert torch.equal(gate.half(), expected_gate)


@pytest.mark.parametrize(
    ("qg", "head_dim", "message"),
    [
        (torch.zeros(1, 2, 16), 4, "qg is float32, expected float16"),
        (torch.zeros(2, 16).half(), 4, "expected 3 dimensions"),
        (torch.zeros(1, 2, 16).half(), 3, "is 16, expected a multiple of 2 . head_dim = 6"),
        (torch.zeros(1, 2, 16).half(), 0, "expected a multiple"),
        (torch.zeros(1, 2, 32).half()[..., ::2], 4, "strides .*expected a contiguous tensor"),
    ],
)
def test_the_fast_path_refuses_anything_else(qg, head_dim, message):
    with pytest.raises(FormatError, match=message):
        ops.deinterleave_qg(qg, head_dim)
