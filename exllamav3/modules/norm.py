"""Root-mean-square norms, computed in float32 whatever the activations are."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.module import Module, TensorSource, read_weight
from exllamav3.ops import rms_norm


class RMSNorm(Module):
    """`y = x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension.

    Args:
        key: its weight is `<key>.weight`, `(size,)`.
        size: length of the last dimension.
        eps: added to the mean square.
        offset: 1 where the family stores `weight - 1` (Qwen3-Next, Qwen3.5), else 0.
    """

    def __init__(self, key: str, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(key)
        self.size, self.eps, self.offset = size, eps, offset
        self.weight: Tensor | None = None
        self._scale: Tensor | None = None  # weight + offset, made once
        self._stored_dtype = torch.float32

    def own_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Its weight."""
        return (f"{self.key}.weight",)

    def load_own(self, source: TensorSource) -> None:
        """Read the weight and hold it in float32."""
        weight, self._stored_dtype = read_weight(
            source, f"{self.key}.weight", (self.size,), "norm weight"
        )
        self.weight = weight.to(self.device, torch.float32)
        self._scale = self.weight + self.offset

    def own_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """Those of the weight and of the scale made of it."""
        return 2 * self.size * torch.float32.itemsize

    def unload_own(self) -> None:
        """Drop the weight."""
        self.weight = self._scale = None

    def get_tensors(self) -> dict[str, Tensor]:
        """The weight in the dtype it came in; exact, because float32 holds every BF16 and F16."""
        assert self.weight is not None
        return {f"{self.key}.weight": self.weight.to(self._stored_dtype)}

    @property
    def scale(self) -> Tensor:
        """What the normalised input is multiplied with, float32 `(size,)`; loaded modules only."""
        assert self._scale is not None
        return self._scale

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(..., size)` of any float dtype to the activation dtype."""
        return rms_norm(x, self.scale, self.eps, out_dtype=self.dtype)


class GatedRMSNorm(RMSNorm):
    """The output norm of the gated delta net: `RMSNorm(x) * silu(gate)`, with no offset."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x`, `gate` `(..., size)` to the activation dtype; arithmetic in float32.

        Source: transformers, `Qwen3_5RMSNormGated` ("norm before gate").
        """
        return rms_norm(x, self.scale, self.eps, gate, self.dtype)
