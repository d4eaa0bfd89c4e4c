"""What travels with the activations through one forward pass, and what a cache must offer.

Conventions of a batch:

- `b` rows, each its own sequence, `s` new tokens a row. Prompts of unequal length are padded on
  the *right*; `new_lengths[r]` says how many of the `s` tokens of row r are real.
- `positions[r, i]` is the place of token i in its sequence, starting at 0. With a cache it is also
  the index of its key among the row's cached keys, so query i of row r may look at the keys
  `0 .. positions[r, i]`; nothing else is needed to build the mask.
- Outputs at padded places are finite and meaningless. Padded tokens never change recurrent state.

A cache lives in `exllamav3/cache`; modules know it by the protocols below and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What one softmax attention layer stores for each token: k and v of `(kv_heads, head_dim)`.

    `layer` is the number of the decoder layer, unique in the model, not consecutive in hybrids.
    """

    layer: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What one gated-delta-net layer stores for each sequence, whatever its length.

    conv state: `(conv_channels, conv_kernel - 1)`, the newest inputs of the causal convolution
    (before it), oldest first. delta state: float32 `(value_heads, key_dim, value_dim)`.
    Both are zero for a new sequence.
    """

    layer: int
    conv_channels: int
    conv_kernel: int
    value_heads: int
    key_dim: int
    value_dim: int


class BatchCache(Protocol):
    """The cached state of the sequences of one batch: row r is the same sequence in every call."""

    def update_kv(
        self, layer: int, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, return all of them.

        Args:
            layer: decoder layer number, as in `KvSpec.layer`.
            k, v: `(b, s, kv_heads, head_dim)`, activation dtype; v may be strided.
            ctx: `positions` says where each token goes; places with
                `i >= new_lengths[r]` are padding and need not be stored.

        Returns:
            k and v `(b, t, kv_heads, head_dim)` in the activation dtype, `t > max(positions)` of
            the real tokens; index = position. What lies beyond a row's own tokens must be finite.
        """
        ...

    def read_conv(self, layer: int, ctx: ForwardContext) -> Tensor:
        """Return the conv state `(b, conv_channels, conv_kernel - 1)` in any float dtype."""
        ...

    def write_conv(self, layer: int, conv: Tensor, ctx: ForwardContext) -> None:
        """Store the conv state as it is after the real tokens of this pass (shape as read)."""
        ...

    def delta_states(self, layer: int, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the delta states are, to be advanced in place.

        Returns:
            float32 `(slots, value_heads, key_dim, value_dim)`; int64 `(b,)`, the slot of each
            row; bool `(b,)`, True where a sequence begins and the slot holds what another left.
        """
        ...


class BindableCache(Protocol):
    """What a caller passes as `params["cache"]`."""

    def bind(self, params: Mapping[str, Any], batch: int) -> BatchCache:
        """The view of this cache for the `batch` rows that `params` describes.

        `params` is what the caller gave to `Model.forward`; `sequences`, `batch_shape` and
        `block_table` are the cache's own business. Raises FormatError when they do not describe
        `batch` sequences of this cache.
        """
        ...


class Capture(Protocol):
    """Receives the inputs of linears during calibration."""

    def observe(self, qmap: str, key: str, x: Tensor) -> None:
        """`x` `(..., in_features)` is about to enter linear `key`, whose Hessian is `qmap`."""
        ...


@dataclass(slots=True)
class ForwardContext:
    """Everything a module may ask about the pass it is part of.

    positions: int64 `(b, s)` on the device of the activations, see the module docstring.
    new_lengths: int64 `(b,)` on that device, or None when every token is real.
    cache: None for an uncached pass, in which the `s` tokens are the whole sequences.
    capture: None except while calibrating.
    shared: what one layer computes and the others of its device reuse in this pass (rotation,
        masks).
    """

    positions: Tensor
    new_lengths: Tensor | None = None
    cache: BatchCache | None = None
    capture: Capture | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def uncached(cls, batch: int, seq: int, device: torch.device | str = "cpu") -> ForwardContext:
        """The context of whole sequences of equal length with no cache."""
        positions = torch.arange(seq, device=device).expand(batch, seq)
        return cls(positions=positions)

    def to(self, device: torch.device) -> ForwardContext:
        """The same pass for layers on another device, with nothing shared yet.

        Copies between GPUs are queued behind the work that makes what they copy; nothing waits.
        """
        lengths = self.new_lengths
        return ForwardContext(
            positions=self.positions.to(device, non_blocking=True),
            new_lengths=None if lengths is None else lengths.to(device, non_blocking=True),
            cache=self.cache,
            capture=self.capture,
        )
