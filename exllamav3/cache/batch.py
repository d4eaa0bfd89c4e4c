"""The view of a cache that one forward pass sees: a fixed list of sequences, one a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.cache.kv import KvLayer
from exllamav3.cache.pages import PAGE_SIZE
from exllamav3.cache.recurrent import RecurrentLayer
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext


@dataclass(frozen=True, slots=True)
class Row:
    """Where one sequence lives: its pages in order, and its slot for recurrent states."""

    pages: tuple[int, ...]
    slot: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of a pass go and how far reading reaches; the same for every layer.

    places_N: place of each real token, row by row. is_real_N: index into the flattened
    `(b * s)` tokens, None when all are real. pages_BP: page table, int64. tokens: how many
    cached tokens are read. first_place: see `KvLayer.read`.
    """

    places_N: Tensor
    is_real_N: Tensor | None
    pages_BP: Tensor
    tokens: int
    first_place: int | None


class BoundCache:
    """Implements `modules.context.BatchCache` over the layers of a `Cache`.

    Args:
        rows: the sequences of the batch.
        kv_layer: the storage of a decoder layer, for tensors of that device and dtype.
        recurrent_layer: the same for recurrent layers.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        kv_layer: Callable[[int, Tensor], KvLayer],
        recurrent_layer: Callable[[int, torch.device], RecurrentLayer],
    ) -> None:
        self._rows = rows
        self._kv_layer = kv_layer
        self._recurrent_layer = recurrent_layer
        self._placement: Placement | None = None

    def update_kv(
        self, layer: int, k: Tensor, v: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values `(b, s, kv_heads, head_dim)`, return all of them.

        Raises:
            FormatError: a token lies beyond the pages of its sequence.
        """
        if self._placement is None:
            self._placement = self._place(ctx)
        at = self._placement
        storage = self._kv_layer(layer, k)
        k_NHD, v_NHD = k.flatten(0, 1), v.flatten(0, 1)
        if at.is_real_N is not None:
            k_NHD, v_NHD = k_NHD[at.is_real_N.to(k.device)], v_NHD[at.is_real_N.to(k.device)]
        storage.write(at.places_N.to(k.device), k_NHD, v_NHD)
        k_all, v_all = storage.read(at.pages_BP.to(k.device), at.tokens, at.first_place)
        return k_all.to(k.dtype), v_all.to(v.dtype)

    def read_recurrent(self, layer: int, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return conv and delta state; zeros for rows whose first new token is their first."""
        device = ctx.positions.device
        return self._recurrent_layer(layer, device).read(
            self._slots(layer, device), ctx.positions[:, 0] == 0
        )

    def write_recurrent(self, layer: int, conv: Tensor, delta: Tensor, ctx: ForwardContext) -> None:
        """Store both states as they are after the real tokens of this pass."""
        device = ctx.positions.device
        self._recurrent_layer(layer, device).write(self._slots(layer, device), conv, delta)

    def _slots(self, layer: int, device: torch.device) -> Tensor:
        slots = [row.slot for row in self._rows]
        if any(slot is None for slot in slots):
            raise FormatError(
                f"cache: decoder layer {layer} has recurrent state, which a block table cannot "
                f'describe; pass "sequences" (Cache.new_sequence) or "batch_shape" instead'
            )
        return torch.tensor(slots, dtype=torch.long, device=device)

    def _place(self, ctx: ForwardContext) -> Placement:
        """Turn positions into places, on the CPU: one synchronisation a pass."""
        positions = ctx.positions.cpu()
        batch, seq = positions.shape
        is_real = torch.ones((batch, seq), dtype=torch.bool)
        if ctx.new_lengths is not None:
            is_real = torch.arange(seq) < ctx.new_lengths.cpu()[:, None]
        longest = max(len(row.pages) for row in self._rows)
        # Short rows are filled up with their own first page: finite, masked, never another's.
        table = torch.tensor(
            [[*r.pages, *[r.pages[0]] * (longest - len(r.pages))] for r in self._rows]
        )
        limit = torch.tensor([len(row.pages) * PAGE_SIZE for row in self._rows])
        over = is_real & (positions >= limit[:, None])
        if bool(over.any()):
            row = int(over.any(dim=1).nonzero()[0])
            raise FormatError(
                f"cache: row {row} has a token at position {int(positions[row].max())}, its "
                f"sequence holds {int(limit[row])} tokens; reserve more tokens for the sequence"
            )
        tokens = int(positions[is_real].max()) + 1 if bool(is_real.any()) else 0
        page = positions.clamp(max=longest * PAGE_SIZE - 1) // PAGE_SIZE
        places = table.gather(1, page) * PAGE_SIZE + positions % PAGE_SIZE
        all_real = bool(is_real.all())
        return Placement(
            places_N=places[is_real],
            is_real_N=None if all_real else is_real.flatten().nonzero().squeeze(1),
            pages_BP=table[:, : -(-tokens // PAGE_SIZE)],
            tokens=tokens,
            first_place=_first_place(self._rows),
        )


def _first_place(rows: Sequence[Row]) -> int | None:
    if len(rows) != 1:
        return None
    first, count = rows[0].pages[0], len(rows[0].pages)
    return first * PAGE_SIZE if rows[0].pages == tuple(range(first, first + count)) else None
