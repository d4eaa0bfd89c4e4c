"""The view of a cache that one forward pass sees: a fixed list of sequences, one a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exllamav3.cache.kv import KvLayer
from exllamav3.cache.placement import FixedBatch, Placement, Row, place, place_fixed
from exllamav3.cache.recurrent import RecurrentLayer
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext


class BoundCache:
    """Implements `modules.context.BatchCache` over the layers of a `Cache`.

    Args:
        rows: the sequences of the batch, perhaps prepared for passes of constant shape.
        past_B: see `placement.place`.
        kv_layer: the storage of a decoder layer, for tensors of that device and dtype.
        recurrent_layer: the same for recurrent layers.
    """

    def __init__(
        self,
        rows: Sequence[Row] | FixedBatch,
        past_B: Tensor | None,
        kv_layer: Callable[[int, Tensor], KvLayer],
        recurrent_layer: Callable[[int, torch.device], RecurrentLayer],
    ) -> None:
        self._rows = rows
        self._past_B = past_B
        self._kv_layer = kv_layer
        self._recurrent_layer = recurrent_layer
        # What all layers of a device share; layers may be spread over several devices.
        self._placements: dict[torch.device, Placement] = {}
        self._slots_B: dict[torch.device, Tensor] = {}

    def update_kv(
        self, layer: int, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values `(b, s, kv_heads, head_dim)`, return all of them.

        Raises:
            FormatError: a token lies beyond the pages of its sequence.
        """
        at = self._placement(ctx)
        storage = self._kv_layer(layer, k)
        k_NHD, v_NHD = k.flatten(0, 1), v.flatten(0, 1)
        if at.is_real_N is not None:
            k_NHD, v_NHD = k_NHD[at.is_real_N], v_NHD[at.is_real_N]
        storage.write(at.places_N, k_NHD, v_NHD)
        k_all, v_all = storage.read(at.pages_BP, at.tokens, at.first_place)
        return k_all.to(k.dtype), v_all.to(v.dtype)

    def read_conv(self, layer: int, ctx: ForwardContext) -> Tensor:
        """Return the conv state; zeros for rows whose first new token is their first."""
        storage = self._recurrent_layer(layer, ctx.positions.device)
        return storage.read_conv(self._slots(layer, ctx), _is_new(ctx))

    def write_conv(self, layer: int, conv: Tensor, ctx: ForwardContext) -> None:
        """Store the conv state as it is after the real tokens of this pass."""
        storage = self._recurrent_layer(layer, ctx.positions.device)
        storage.write_conv(self._slots(layer, ctx), conv)

    def delta_states(self, layer: int, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return all delta states, the slot of each row, and whether its sequence begins."""
        storage = self._recurrent_layer(layer, ctx.positions.device)
        return storage.delta, self._slots(layer, ctx), _is_new(ctx)

    def _placement(self, ctx: ForwardContext) -> Placement:
        device = ctx.positions.device
        if device not in self._placements:
            if isinstance(self._rows, FixedBatch):
                self._placements[device] = place_fixed(self._rows.to(device), ctx)
            elif self._placements:  # found on the host once; every device sees the same
                self._placements[device] = next(iter(self._placements.values())).to(device)
            else:
                self._placements[device] = place(self._rows, self._past_B, ctx)
        return self._placements[device]

    def _slots(self, layer: int, ctx: ForwardContext) -> Tensor:
        device = ctx.positions.device
        if device not in self._slots_B:
            self._slots_B[device] = self._find_slots(layer, device)
        return self._slots_B[device]

    def _find_slots(self, layer: int, device: torch.device) -> Tensor:
        if isinstance(self._rows, FixedBatch):
            return self._rows.slots_B.to(device, non_blocking=True)
        slots = [row.slot for row in self._rows]
        if any(slot is None for slot in slots):
            raise FormatError(
                f"cache: decoder layer {layer} has recurrent state, which a block table cannot "
                f'describe; pass "sequences" (Cache.new_sequence) or "batch_shape" instead'
            )
        return torch.tensor(slots, dtype=torch.long, device=device)


def _is_new(ctx: ForwardContext) -> Tensor:
    """Which rows begin with the first token of their sequence; found once a pass."""
    is_new: Tensor | None = ctx.shared.get("is_new")
    if is_new is None:
        is_new = ctx.shared["is_new"] = ctx.positions[:, 0] == 0
    return is_new
