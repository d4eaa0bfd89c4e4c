"""The small steps between the linears of a model, in plain torch.

Sources: transformers, `Qwen3_5RMSNorm`, `Qwen3_5RMSNormGated` ("norm before gate"),
`Qwen3_5GatedDeltaNet`, `apply_rotary_pos_emb`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

L2_EPS = 1e-6


def rms_norm(
    x: Tensor, scale: Tensor, eps: float, gate: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * scale [* silu(gate)]`` over the last dimension."""
    y = F.rms_norm(x.float(), (scale.shape[0],), scale, eps)
    if gate is not None:
        y = y * F.silu(gate.float())
    return y.to(out_dtype).contiguous()


def norm_rotate(x: Tensor, scale: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMS norm over the head, rounded to the dtype of x, then the rotation of its first lanes."""
    if scale is not None:
        x = rms_norm(x, scale, eps, None, x.dtype)
    half = cos.shape[-1]
    wide = x.float()
    first, second = wide[..., :half], wide[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)


def gate_mul(gate: Tensor, x: Tensor, silu: bool) -> Tensor:
    """``x * silu(gate)`` or ``x * sigmoid(gate)``, the factor rounded to the dtype of the gate."""
    return (F.silu(gate) if silu else torch.sigmoid(gate)).mul(x).to(x.dtype).contiguous()


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
    """Convolution, unit norms, decay and write strength; see `ops.delta_inputs`."""
    padded = torch.cat([past, qkv.float().transpose(1, 2)], dim=-1)
    mixed = F.silu(F.conv1d(padded, weight, groups=weight.shape[0])).transpose(1, 2)
    value_heads, key_width = decay_log.shape[0], key_heads * key_dim
    q, k, v = mixed.split([key_width, key_width, mixed.shape[-1] - 2 * key_width], dim=-1)
    q = _unit(q.unflatten(-1, (-1, key_dim))) * key_dim**-0.5
    k = _unit(k.unflatten(-1, (-1, key_dim)))
    v = v.unflatten(-1, (value_heads, -1))
    g, beta = _decay_and_rate(a, b, decay_log, time_bias, lengths)
    following = _last_columns(padded, past.shape[-1], lengths)
    return (
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g.contiguous(),
        beta.contiguous(),
        following.contiguous(),
    )


def _unit(x: Tensor) -> Tensor:
    """Rows scaled to unit length: ``x / sqrt(sum(x^2) + 1e-6)``."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _decay_and_rate(
    a: Tensor, b: Tensor, decay_log: Tensor, time_bias: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    g = -decay_log.exp() * F.softplus(a.float() + time_bias)
    beta = torch.sigmoid(b.float())
    if lengths is not None:
        steps = torch.arange(a.shape[1], device=a.device)
        real = (steps < lengths[:, None]).unsqueeze(-1)
        g, beta = g * real, beta * real
    return g, beta


def _last_columns(padded: Tensor, keep: int, lengths: Tensor | None) -> Tensor:
    """The last `keep` columns before each row's padding."""
    if lengths is None:
        return padded[..., padded.shape[-1] - keep :].clone()
    columns = lengths[:, None] + torch.arange(keep, device=padded.device)
    return padded.gather(-1, columns[:, None, :].expand(-1, padded.shape[1], -1))
