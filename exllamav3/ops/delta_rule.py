"""The gated delta rule of linear attention as an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import FLOATS, check_shape, check_tensor
from exllamav3.ops.reference import delta_rule as reference
from exllamav3.ops.register import register

OP = "gated_delta_rule"


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance the state over s tokens: decay, forget what k recalls, write beta * (v - recalled).

    Args:
        q, k: ``(b, s, k_heads, dk)``, already normalised and scaled.
        v: ``(b, s, v_heads, dv)``; v-head h reads k-head ``h // (v_heads / k_heads)``.
        g: float32 ``(b, s, v_heads)``, logarithm of the decay.
        beta: float32 ``(b, s, v_heads)``, strength of the write.
        state: float32 ``(b, v_heads, dk, dv)``; not modified.

    Returns:
        Output ``(b, s, v_heads, dv)`` in the dtype of `v`, and the new state, float32.

    Raises:
        FormatError: wrong dtype or shape.
    """
    check_tensor(OP, "q", q, FLOATS, 4)
    for name, tensor, dtypes, dim in (
        ("k", k, (q.dtype,), 4),
        ("v", v, (q.dtype,), 4),
        ("g", g, (torch.float32,), 3),
        ("beta", beta, (torch.float32,), 3),
        ("state", state, (torch.float32,), 4),
    ):
        check_tensor(OP, name, tensor, dtypes, dim, q.device)
    b, s, k_heads, dk = q.shape
    v_heads, dv = v.shape[2:]
    check_shape(OP, "k", k, q.shape, "the shape of q")
    check_shape(OP, "v", v, (b, s, v_heads, dv), "batch and tokens of q")
    check_shape(OP, "g", g, (b, s, v_heads), "batch, tokens and heads of v")
    check_shape(OP, "beta", beta, (b, s, v_heads), "batch, tokens and heads of v")
    check_shape(OP, "state", state, (b, v_heads, dk, dv), "batch, v heads, dk of q, dv of v")
    if k_heads == 0 or v_heads % k_heads:
        raise FormatError(
            f"{OP}: v has {v_heads} heads, expected a multiple of the {k_heads} heads of q and k"
        )
    result: tuple[Tensor, Tensor] = torch.ops.exllamav3.gated_delta_rule(q, k, v, g, beta, state)
    return result


def _gated_delta_rule_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


register("gated_delta_rule", reference.gated_delta_rule, _gated_delta_rule_fake)
