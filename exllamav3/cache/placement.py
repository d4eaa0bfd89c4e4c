"""Where the tokens of a forward pass go in the cache, and what is read back.

There are two ways to find out. `place` works on the host: it reads exactly as many tokens as
there are and checks every position. `place_fixed` works on the device with shapes that never
change and without a look at any value, so that a CUDA graph can be captured around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.cache.pages import PAGE_SIZE
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext


@dataclass(frozen=True, slots=True)
class Row:
    """Where one sequence lives: its pages in order, and its slot for recurrent states."""

    pages: tuple[int, ...]
    slot: int | None


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """Rows prepared for passes of constant shape, made by `Cache.fixed_batch`.

    pages_BP, slots_B: int64 on the device of the model (its first, where it has several), where the
    sequences live. Other sequences may be written into them between passes, if `first_place` is
    None. read_tokens: how many cached tokens every pass reads. first_place: see `KvLayer.read`.
    Keep the object as long as a graph captured with it.
    """

    pages_BP: Tensor
    slots_B: Tensor
    read_tokens: int
    first_place: int | None

    def to(self, device: torch.device) -> FixedBatch:
        """The same batch for layers on another device."""
        pages_BP = self.pages_BP.to(device, non_blocking=True)
        slots_B = self.slots_B.to(device, non_blocking=True)
        return FixedBatch(pages_BP, slots_B, self.read_tokens, self.first_place)


@dataclass(frozen=True, slots=True)
class Placement:
    """The same for every layer of a pass on one device.

    places_N: place (`page * 256 + offset`) of each real token, row by row. is_real_N: their indices
    among the flattened `(b * s)` tokens, None when all are real. pages_BP: page table, int64.
    tokens: how many cached tokens are read. first_place: see `KvLayer.read`.
    """

    places_N: Tensor
    is_real_N: Tensor | None
    pages_BP: Tensor
    tokens: int
    first_place: int | None

    def to(self, device: torch.device) -> Placement:
        """The same places for layers on another device."""
        is_real_N = self.is_real_N
        return Placement(
            places_N=self.places_N.to(device, non_blocking=True),
            is_real_N=None if is_real_N is None else is_real_N.to(device, non_blocking=True),
            pages_BP=self.pages_BP.to(device, non_blocking=True),
            tokens=self.tokens,
            first_place=self.first_place,
        )


def place(rows: Sequence[Row], past_B: Tensor | None, ctx: ForwardContext) -> Placement:
    """Find the places of a pass.

    Args:
        rows: where the sequences live.
        past_B: tokens already cached for each row, on the CPU; None to ask the device for the
            positions, which waits for everything it has been given to do.
        ctx: the pass.

    Raises:
        FormatError: a token lies beyond the pages of its sequence.
    """
    seq = ctx.positions.shape[1]
    positions = ctx.positions.cpu() if past_B is None else past_B[:, None] + torch.arange(seq)
    is_real = torch.ones(positions.shape, dtype=torch.bool)
    if ctx.new_lengths is not None:
        is_real = torch.arange(seq) < ctx.new_lengths.cpu()[:, None]
    table = page_table(rows)
    limit = torch.tensor([len(row.pages) * PAGE_SIZE for row in rows])
    over = is_real & (positions >= limit[:, None])
    if bool(over.any()):
        row = int(over.any(dim=1).nonzero()[0])
        raise FormatError(
            f"cache: row {row} has a token at position {int(positions[row].max())}, its "
            f"sequence holds {int(limit[row])} tokens; reserve more tokens for the sequence"
        )
    tokens = int(positions[is_real].max()) + 1 if bool(is_real.any()) else 0
    # Padding may lie beyond the table; its places are computed and dropped.
    page = (positions // PAGE_SIZE).clamp(max=table.shape[1] - 1)
    places = table.gather(1, page) * PAGE_SIZE + positions % PAGE_SIZE
    device = ctx.positions.device
    is_real_N = None if bool(is_real.all()) else is_real.flatten().nonzero().squeeze(1).to(device)
    return Placement(
        places_N=places[is_real].to(device),
        is_real_N=is_real_N,
        pages_BP=table[:, : -(-tokens // PAGE_SIZE)].to(device),
        tokens=tokens,
        first_place=first_place(rows),
    )


def place_fixed(batch: FixedBatch, ctx: ForwardContext) -> Placement:
    """Find the places of a pass of constant shape; nothing is checked.

    Raises:
        FormatError: the pass has padded rows, whose shape is not constant.
    """
    if ctx.new_lengths is not None:
        raise FormatError("cache: a fixed batch takes no new_lengths; every token must be real")
    positions = ctx.positions
    places = batch.pages_BP.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
    return Placement(
        places_N=places.flatten(),
        is_real_N=None,
        pages_BP=batch.pages_BP[:, : -(-batch.read_tokens // PAGE_SIZE)],
        tokens=batch.read_tokens,
        first_place=batch.first_place,
    )


def page_table(rows: Sequence[Row], pages: int | None = None) -> Tensor:
    """int64 `(b, pages)`, by default as many pages as the longest row has.

    A short row repeats its own first page, which masks keep from view; a long one is cut.
    """
    pages = pages or max(len(row.pages) for row in rows)
    return torch.tensor(
        [[*row.pages[:pages], *[row.pages[0]] * (pages - len(row.pages))] for row in rows]
    )


def first_place(rows: Sequence[Row]) -> int | None:
    """The place of token 0 if there is one row, with consecutive pages; see `KvLayer.read`."""
    if len(rows) != 1:
        return None
    first, count = rows[0].pages[0], len(rows[0].pages)
    return first * PAGE_SIZE if rows[0].pages == tuple(range(first, first + count)) else None
