"""Decode steps replayed as CUDA graphs.

A decode step is hundreds of short kernels. Launched one by one they keep the CPU busy longer than
the GPU; captured once and replayed they follow each other without a gap, with every buffer where it
was. A graph fixes all shapes, so there is one for each number of rows and each length of cache that
is read, in powers of two; everything else about the rows is in one small table on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from exllamav3.cache import PAGE_SIZE, Cache, FixedBatch, Sequence, page_table

MAX_GRAPHS = 64
"""Graphs kept; the one not used for longest goes first."""

COLUMNS = 3
"""Of the table before the pages: token id, tokens cached so far, slot of recurrent states."""


class HasForward(Protocol):
    """What is needed of a model."""

    def forward(self, ids: Tensor, params: Mapping[str, Any]) -> Tensor: ...


class DecodeGraphs:
    """Runs steps of one new token for each of some sequences.

    The first step of a shape runs as it is, which makes whatever the kernels need, and is captured
    afterwards; later ones are replayed. Graphs hold the addresses of the model's weights and of the
    cache: after reloading either, make a new object.

    Args:
        model: a loaded model.
        cache: a cache made for it.
        device: where both are.
        capture: False runs every step as it is, with the same constant shapes; works on the CPU.
    """

    def __init__(
        self, model: HasForward, cache: Cache, device: torch.device | str, capture: bool = True
    ) -> None:
        self._model, self._cache = model, cache
        self._device = torch.device(device)
        self._capture = capture
        self._steps: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        # One pool for all graphs: they never run at the same time.
        self._pool = torch.cuda.graph_pool_handle() if capture else None

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """`(rows, pages read)` of the steps that are kept, the latest last."""
        return list(self._steps)

    @torch.inference_mode()
    def step(self, sequences: list[Sequence], ids_B1: Tensor) -> Tensor:
        """Process one token of each sequence at its `length`, which the caller advances.

        Args:
            sequences: handles of the cache with room for one more token each.
            ids_B1: int64 `(b, 1)` token ids, on the CPU.

        Returns:
            float32 logits `(b, vocab)`; the next step overwrites them.
        """
        pages = self._pages(max(sequence.length for sequence in sequences) + 1)
        shape = (len(sequences), pages)
        step = self._steps.get(shape)
        is_new = step is None
        if step is None:
            step = self._steps[shape] = _Step(self._model, self._cache, *shape, self._device)
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(shape)
        step.describe(sequences, ids_B1)
        logits_BV = step.run()
        if is_new and self._capture:
            logits_BV = logits_BV.clone()
            step.record(self._pool)
        return logits_BV

    def _pages(self, tokens: int) -> int:
        """Pages to read for that many tokens: a power of two, or the whole cache."""
        pages = -(-tokens // PAGE_SIZE)
        return min(1 << (pages - 1).bit_length(), self._cache.max_num_tokens // PAGE_SIZE)


class _Step:
    """One shape: its table on the device, and its graph once it is recorded."""

    def __init__(
        self, model: HasForward, cache: Cache, rows: int, pages: int, device: torch.device
    ) -> None:
        self._model = model
        self._pages = pages
        self._table_BX = torch.zeros(rows, COLUMNS + pages, dtype=torch.long, device=device)
        _, lengths_B, slots_B = self._table_BX[:, :COLUMNS].unbind(1)
        self._ids_B1 = self._table_BX[:, :1]
        self._params = {
            "cache": cache,
            "sequences": FixedBatch(
                self._table_BX[:, COLUMNS:], slots_B, pages * PAGE_SIZE, first_place=None
            ),
            "cache_seqlens": lengths_B,
        }
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits_BV: Tensor | None = None

    def describe(self, sequences: list[Sequence], ids_B1: Tensor) -> None:
        """Write what the step is about into the table: one small copy to the device."""
        rows = [sequence.row for sequence in sequences]
        numbers = [[sequence.length, sequence.row.slot or 0] for sequence in sequences]
        parts = [ids_B1, torch.tensor(numbers), page_table(rows, self._pages)]
        # The source is pageable memory, which the driver has read when the call returns.
        self._table_BX.copy_(torch.cat(parts, dim=1), non_blocking=True)

    def run(self) -> Tensor:
        """Replay the graph, or run the model if there is none yet."""
        if self._graph is None:
            return self._model.forward(self._ids_B1, self._params)[:, -1]
        assert self._logits_BV is not None
        self._graph.replay()
        return self._logits_BV

    def record(self, pool: Any) -> None:
        """Capture the step; nothing is executed."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._table_BX.device),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._logits_BV = self._model.forward(self._ids_B1, self._params)[:, -1]
        self._graph = graph
