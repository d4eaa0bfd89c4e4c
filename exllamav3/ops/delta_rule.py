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
    _check(q, k, v, g, beta, state)
    result: tuple[Tensor, Tensor] = torch.ops.exllamav3.gated_delta_rule(q, k, v, g, beta, state)
    return result


def advance_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    """`gated_delta_rule` on states that are kept elsewhere and advanced in place.

    Args:
        q, k, v, g, beta: as there.
        states: float32 ``(any number, v_heads, dk, dv)``, contiguous; the rows' are overwritten.
        slots: int64 ``(b,)``, which state belongs to each row; all different.
        is_new: bool ``(b,)``, rows that begin with a state of zeros, whatever is stored.

    Returns:
        Output ``(b, s, v_heads, dv)`` in the dtype of `v`.

    Raises:
        FormatError: wrong dtype, shape or layout. Slots are not checked.
    """
    _check(q, k, v, g, beta, states, len(states) if states.dim() else None)
    for name, tensor, dtype in (("slots", slots, torch.int64), ("is_new", is_new, torch.bool)):
        check_tensor(OP, name, tensor, (dtype,), 1, q.device)
        check_shape(OP, name, tensor, q.shape[:1], "one for each row of q")
    if not states.is_contiguous():
        raise FormatError(f"{OP}: states has strides {states.stride()}, expected contiguous")
    result: Tensor = torch.ops.exllamav3.advance_delta_rule(q, k, v, g, beta, states, slots, is_new)
    return result


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: int | None = None,
) -> None:
    """Check the arguments; `slots` is the number of states, by default that of the rows."""
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
    check_shape(OP, "state", state, (slots or b, v_heads, dk, dv), "sizes of q and v")
    if k_heads == 0 or v_heads % k_heads:
        raise FormatError(
            f"{OP}: v has {v_heads} heads, expected a multiple of the {k_heads} heads of q and k"
        )


def _gated_delta_rule_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


register("gated_delta_rule", reference.gated_delta_rule, _gated_delta_rule_fake)


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    # Overwritten rather than multiplied by 0: an old state may hold NaN.
    before = states[slots].masked_fill(is_new[:, None, None, None], 0)
    o, after = torch.ops.exllamav3.gated_delta_rule(q, k, v, g, beta, before)
    states[slots] = after
    return o


def _advance_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor,
    is_new: Tensor,
) -> Tensor:
    return v.new_empty(v.shape)


register("advance_delta_rule", _advance, _advance_fake)
