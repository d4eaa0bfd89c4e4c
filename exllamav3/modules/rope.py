"""Rotary position embedding: which angle each lane turns by, and the turning.

Lane `t` of the rotary part is paired with lane `t + rotary_dim / 2` (NeoX order). Lanes beyond
`rotary_dim` pass through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.norm import RMSNorm
from exllamav3.ops import norm_rotate


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How frequencies are derived; every field is explicit, `rope_type` says which are used.

    rope_type: "default", "linear", "llama3" or "yarn".
    theta: base of the geometric series of wavelengths.
    rotary_dim: lanes of a head that turn, even.
    factor: context extension factor (linear, llama3, yarn).
    original_max_positions: context length before the extension (llama3, yarn).
    low_freq_factor, high_freq_factor: ends of the blended band (llama3).
    beta_fast, beta_slow, truncate: ends of the blended band in turns (yarn), whether rounded.
    attention_factor: multiplies cos and sin (yarn), already derived from mscale where absent.
    """

    theta: float
    rotary_dim: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def inv_freq(self) -> Tensor:
        """Angles per position, float32 `(rotary_dim / 2)`."""
        lanes = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32)
        plain = 1.0 / (self.theta ** (lanes / self.rotary_dim))
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._llama3(plain)
        if self.rope_type == "yarn":
            return self._yarn(plain)
        return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Slow lanes are stretched by `factor`, fast ones kept, a band between is blended.

        Source: the reference code of Llama 3.1 (`apply_scaling`).
        """
        turns = self.original_max_positions * plain / (2 * math.pi)
        band = self.high_freq_factor - self.low_freq_factor
        keep = ((turns - self.low_freq_factor) / band).clamp(0.0, 1.0)
        return keep * plain + (1.0 - keep) * plain / self.factor

    def _yarn(self, plain: Tensor) -> Tensor:
        """Blend by lane number between the lanes that turn `beta_fast` and `beta_slow` times.

        Source: YaRN (arXiv 2309.00071), section 3.2.
        """

        def lane_of(turns: float) -> float:
            wavelength = self.original_max_positions / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = lane_of(self.beta_fast), lane_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        width = high - low if high != low else 0.001  # a step where both ends meet
        stretch = ((torch.arange(len(plain), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
        return stretch * plain / self.factor + (1.0 - stretch) * plain


class Rope:
    """The rotation of one model, shared by all of its attention layers."""

    def __init__(self, settings: RopeSettings) -> None:
        self.settings = settings
        self._inv_freq = settings.inv_freq()
        self._on_device: dict[torch.device, Tensor] = {}

    def table(self, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 `(b, s, 1, rotary_dim / 2)`; made once a pass."""
        table: tuple[Tensor, Tensor] | None = ctx.shared.get(self)
        if table is None:
            device = ctx.positions.device
            if device not in self._on_device:
                self._on_device[device] = self._inv_freq.to(device)
            angle = ctx.positions[:, :, None, None].float() * self._on_device[device]
            factor = self.settings.attention_factor
            table = ctx.shared[self] = (angle.cos() * factor, angle.sin() * factor)
        return table

    def apply(self, x: Tensor, ctx: ForwardContext, norm: RMSNorm | None = None) -> Tensor:
        """Turn `(b, s, heads, head_dim)` in float32, after the norm if there is one; same shape and
        dtype out, contiguous."""
        scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
        return norm_rotate(x, scale, eps, *self.table(ctx))
