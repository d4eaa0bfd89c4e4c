"""Recurrent state of one gated delta net layer: one entry a sequence, whatever its length."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.modules.context import RecurrentSpec


class RecurrentLayer:
    """Convolution window and delta state of up to `slots` sequences.

    The delta states are advanced in place by whoever gets `delta`: they are the larger part, and
    a decode step reads and writes them once.

    conv: the newest `conv_kernel - 1` inputs of the causal convolution, oldest first. delta: the
    state of the delta rule. Both float32: they are small, and rounding the delta state would
    accumulate over a sequence.

    Args:
        slots: how many sequences.
        spec: geometry of the layer.
        device: of the activations.
    """

    def __init__(self, slots: int, spec: RecurrentSpec, device: torch.device) -> None:
        conv_shape = (slots, spec.conv_channels, spec.conv_kernel - 1)
        delta_shape = (slots, spec.value_heads, spec.key_dim, spec.value_dim)
        self._conv = torch.zeros(conv_shape, dtype=torch.float32, device=device)
        self.delta = torch.zeros(delta_shape, dtype=torch.float32, device=device)

    def read_conv(self, slots_B: Tensor, is_new_B: Tensor) -> Tensor:
        """Return the convolution windows of some sequences, zeros for the new ones."""
        # Overwritten rather than multiplied by 0: an old state may hold NaN.
        return self._conv[slots_B].masked_fill(is_new_B[:, None, None], 0)

    def write_conv(self, slots_B: Tensor, conv: Tensor) -> None:
        """Store the convolution windows of some sequences."""
        self._conv[slots_B] = conv.to(self._conv.dtype)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (self._conv, self.delta))
