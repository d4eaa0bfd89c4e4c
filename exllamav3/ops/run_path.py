"""The small steps between the linears of a model: norms, rotation, gates, delta net inputs.

On a CUDA device each is one kernel; in decode a chain of elementwise kernels would be all launch
latency. On the CPU they are torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import FLOATS, check_shape, check_tensor
from exllamav3.ops.codec import check_out_dtype
from exllamav3.ops.reference import run_path as reference
from exllamav3.ops.register import register


def rms_norm(
    x: Tensor,
    scale: Tensor,
    eps: float,
    gate: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * scale``, times ``silu(gate)`` if there is a gate; in float32.

    Args:
        x: float32, float16 or bfloat16 ``(..., size)``.
        scale: float32 ``(size,)``.
        eps: added to the mean square.
        gate: of the shape of `x`, any of those dtypes.
        out_dtype: of the result; that of `x` if None.

    Raises:
        FormatError: wrong dtype or shape.
    """
    op = "rms_norm"
    check_tensor(op, "x", x, FLOATS)
    check_tensor(op, "scale", scale, (torch.float32,), 1, x.device)
    if x.dim() == 0 or x.shape[-1] != scale.shape[0] or scale.shape[0] == 0:
        raise FormatError(
            f"{op}: x has shape {tuple(x.shape)}, expected (..., {scale.shape[0]}) as `scale` has"
        )
    if gate is not None:
        check_tensor(op, "gate", gate, FLOATS, x.dim(), x.device)
        check_shape(op, "gate", gate, x.shape, "the shape of x")
    dtype = x.dtype if out_dtype is None else out_dtype
    check_out_dtype(op, dtype)
    result: Tensor = torch.ops.exllamav3.rms_norm(x, scale, float(eps), gate, dtype)
    return result


def norm_rotate(x: Tensor, scale: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm over each head if there is a scale, then rotary position embedding.

    Lane t of the rotary part turns with lane ``t + half``; lanes from ``2 * half`` on stay.

    Args:
        x: ``(b, s, heads, head_dim)``, any float dtype; may be a strided view.
        scale: float32 ``(head_dim,)``, or None for no norm.
        eps: of the norm.
        cos, sin: float32 ``(b, s, 1, half)``.

    Returns:
        ``(b, s, heads, head_dim)`` in the dtype of `x`, contiguous.

    Raises:
        FormatError: wrong dtype or shape.
    """
    op = "norm_rotate"
    check_tensor(op, "x", x, FLOATS, 4)
    if scale is not None:
        check_tensor(op, "scale", scale, (torch.float32,), 1, x.device)
        check_shape(op, "scale", scale, x.shape[-1:], "the head size of x")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(op, name, table, (torch.float32,), 4, x.device)
        check_shape(op, name, table, (*x.shape[:2], 1, cos.shape[-1]), "batch and tokens of x")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise FormatError(
            f"{op}: cos has {cos.shape[-1]} angles, x has heads of {x.shape[-1]} lanes, "
            f"two lanes are needed for each angle"
        )
    result: Tensor = torch.ops.exllamav3.norm_rotate(x, scale, float(eps), cos, sin)
    return result


def gate_mul(gate: Tensor, x: Tensor, *, silu: bool) -> Tensor:
    """``x * silu(gate)``, or ``x * sigmoid(gate)``.

    Args:
        gate, x: of one shape, any float dtype.
        silu: which of the two.

    Returns:
        The product in the dtype of `x`.

    Raises:
        FormatError: wrong dtype or shape.
    """
    check_tensor("gate_mul", "x", x, FLOATS)
    check_tensor("gate_mul", "gate", gate, FLOATS, None, x.device)
    check_shape("gate_mul", "gate", gate, x.shape, "the shape of x")
    result: Tensor = torch.ops.exllamav3.gate_mul(gate, x, silu)
    return result


def delta_inputs(
    qkv: Tensor,
    past: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    decay_log: Tensor,
    time_bias: Tensor,
    lengths: Tensor | None,
    key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From the projections of a gated delta net to the arguments of `gated_delta_rule`.

    Causal depthwise convolution and SiLU; q and k to unit length, q times ``key_dim ** -0.5``;
    ``g = -exp(decay_log) softplus(a + time_bias)``, ``beta = sigmoid(b)``. All in float32.

    Args:
        qkv: ``(b, s, channels)``, any float dtype; q, k and v in this order.
        past: float32 ``(b, channels, taps - 1)``, the inputs before these, oldest first.
        weight: float32 ``(channels, 1, taps)``.
        a, b: ``(b, s, v_heads)``, any float dtype.
        decay_log, time_bias: float32 ``(v_heads,)``.
        lengths: int64 ``(b,)``, how many tokens of each row are real, or None for all; at the
            others g and beta are 0.
        key_heads, key_dim: geometry of q and k.

    Returns:
        q, k ``(b, s, key_heads, key_dim)``, v ``(b, s, v_heads, dv)``, g, beta
        ``(b, s, v_heads)`` and the `past` of the next pass, all float32.

    Raises:
        FormatError: wrong dtype or shape.
    """
    op, single = "delta_inputs", (torch.float32,)
    check_tensor(op, "qkv", qkv, FLOATS, 3)
    batch, tokens, channels = qkv.shape
    for name, tensor, dtypes, dim in (
        ("past", past, single, 3),
        ("weight", weight, single, 3),
        ("a", a, FLOATS, 3),
        ("b", b, FLOATS, 3),
        ("decay_log", decay_log, single, 1),
        ("time_bias", time_bias, single, 1),
    ):
        check_tensor(op, name, tensor, dtypes, dim, qkv.device)
    heads, taps = decay_log.shape[0], weight.shape[2]
    values = channels - 2 * key_heads * key_dim
    if min(tokens, key_heads, key_dim, heads) < 1 or values < 1 or values % heads:
        raise FormatError(
            f"{op}: {tokens} tokens of {channels} channels are not q, k and v of {key_heads} key "
            f"heads of {key_dim} and {heads} value heads"
        )
    check_shape(op, "past", past, (batch, channels, taps - 1), "channels of qkv, taps of weight")
    check_shape(op, "weight", weight, (channels, 1, taps), "channels of qkv")
    for name, tensor in (("a", a), ("b", b)):
        check_shape(op, name, tensor, (batch, tokens, heads), "one for each token and value head")
    check_shape(op, "time_bias", time_bias, (heads,), "value heads")
    if lengths is not None:
        check_tensor(op, "lengths", lengths, (torch.int64,), 1, qkv.device)
        check_shape(op, "lengths", lengths, (batch,), "one for each row")
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = (
        torch.ops.exllamav3.delta_inputs(
            qkv, past, weight, a, b, decay_log, time_bias, lengths, key_heads, key_dim
        )
    )
    return result


def _rms_norm_fake(
    x: Tensor, scale: Tensor, eps: float, gate: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


def _norm_rotate_fake(
    x: Tensor, scale: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


def _gate_mul_fake(gate: Tensor, x: Tensor, silu: bool) -> Tensor:
    return x.new_empty(x.shape)


def _delta_inputs_fake(
    qkv: Tensor,
    past: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    decay_log: Tensor,
    time_bias: Tensor,
    lengths: Tensor | None,
    key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, tokens, channels = qkv.shape
    heads = decay_log.shape[0]

    def floats(*shape: int) -> Tensor:
        return qkv.new_empty(shape, dtype=torch.float32)

    keys = (batch, tokens, key_heads, key_dim)
    value_dim = (channels - 2 * key_heads * key_dim) // heads
    return (
        floats(*keys),
        floats(*keys),
        floats(batch, tokens, heads, value_dim),
        floats(batch, tokens, heads),
        floats(batch, tokens, heads),
        floats(*past.shape),
    )


register("rms_norm", reference.rms_norm, _rms_norm_fake)
register("norm_rotate", reference.norm_rotate, _norm_rotate_fake)
register("gate_mul", reference.gate_mul, _gate_mul_fake)
register("delta_inputs", reference.delta_inputs, _delta_inputs_fake)
