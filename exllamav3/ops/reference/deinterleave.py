"""Separating a fused query/gate projection in plain torch."""

from __future__ import annotations

from torch import Tensor


def deinterleave_qg(qg: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Per head, the first `head_dim` lanes are the query and the next ones its gate.

    Args:
        qg: ``(b, s, heads * 2 * head_dim)``, any dtype.

    Returns:
        q ``(b, s, heads, head_dim)`` and gate ``(b, s, heads * head_dim)``, contiguous.
    """
    per_head = qg.unflatten(-1, (-1, 2, head_dim))
    return per_head[..., 0, :].contiguous(), per_head[..., 1, :].flatten(-2).contiguous()
