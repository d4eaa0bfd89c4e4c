"""Decode steps replayed as CUDA graphs.

A decode step is hundreds of short kernels. Launched one by one they keep the CPU busy longer than
the GPU; captured once and replayed they follow each other without a gap, with every buffer where it
was. A graph fixes all shapes, so there is one for each number of rows and each length of cache that
is read, in powers of two; everything else about the rows is in one small table on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from exllamav3.cache import PAGE_SIZE, Cache, FixedBatch, Sequence, page_table

MAX_GRAPHS = 64
"""Graphs kept; the one not used for longest goes first."""

COLUMNS = 3
"""Of the table before the pages: token id, tokens cached so far, slot of recurrent states."""


Forward: TypeAlias = Callable[[Tensor, Mapping[str, Any]], Tensor]
"""Token ids or activations, and what a caller may say about a pass."""


class HasForward(Protocol):
    """What is needed of a model; one on several devices also has `devices`, `forward_segment`."""

    def forward(self, ids: Tensor, params: Mapping[str, Any]) -> Tensor: ...


class DecodeGraphs:
    """Runs steps of one new token for each of some sequences.

    The first step of a shape runs as it is, which makes whatever the kernels need, and is captured
    afterwards; later ones are replayed. Graphs hold the addresses of the model's weights and of the
    cache: after reloading either, make a new object.

    A graph and its memory belong to one device. A model on several has one for each, and the
    activations are copied in between; neither GPU nor host waits more than the data demands.

    Args:
        model: a loaded model.
        cache: a cache made for it.
        device: where both are; of a model on several devices the first.
        capture: False runs every step as it is, with the same constant shapes; works on the CPU.
    """

    def __init__(
        self, model: HasForward, cache: Cache, device: torch.device | str, capture: bool = True
    ) -> None:
        self._cache = cache
        devices = getattr(model, "devices", ())
        self._parts: list[tuple[torch.device, Forward]]
        if len(devices) > 1:
            run = model.forward_segment  # type: ignore[attr-defined]
            self._parts = [(where, partial(run, n)) for n, where in enumerate(devices)]
        else:
            self._parts = [(torch.device(device), model.forward)]
        self._steps: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        self._recorders = [_Recorder(where) for where, _ in self._parts] if capture else []

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
            step = self._steps[shape] = _Step(self._parts, self._cache, *shape)
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
        self._steps.move_to_end(shape)
        step.describe(sequences, ids_B1)
        logits_BV = step.run()
        if is_new and self._recorders:
            logits_BV = logits_BV.clone()
            step.record(self._recorders)
        return logits_BV

    def _pages(self, tokens: int) -> int:
        """Pages to read for that many tokens: a power of two, or the whole cache."""
        pages = -(-tokens // PAGE_SIZE)
        return min(1 << (pages - 1).bit_length(), self._cache.max_num_tokens // PAGE_SIZE)


class _Recorder:
    """What the captures of one device share."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One pool for all graphs of the device: they never run at the same time.
        self.pool = torch.cuda.graph_pool_handle()
        # torch's own capture stream belongs to whichever device came first.
        self.stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a function; nothing is executed. Returns the graph and where the result is."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ),
        ):
            result = function()
        return graph, result


class _Step:
    """One shape: its parts, one for each device."""

    def __init__(
        self, parts: list[tuple[torch.device, Forward]], cache: Cache, rows: int, pages: int
    ) -> None:
        self._pages = pages
        self._parts = [_Part(forward, cache, rows, pages, device) for device, forward in parts]

    def describe(self, sequences: list[Sequence], ids_B1: Tensor) -> None:
        """Write what the step is about into the table of each device: one small copy each."""
        rows = [sequence.row for sequence in sequences]
        numbers = [[sequence.length, sequence.row.slot or 0] for sequence in sequences]
        parts = [ids_B1, torch.tensor(numbers), page_table(rows, self._pages)]
        table_BX = torch.cat(parts, dim=1)
        for part in self._parts:
            part.describe(table_BX)

    def run(self) -> Tensor:
        """Replay the graphs, or run the model if there are none yet."""
        x = self._parts[0].run(None)
        for part in self._parts[1:]:
            x = part.run(x)
        return x[:, -1]

    def record(self, recorders: list[_Recorder]) -> None:
        """Capture the step; nothing is executed."""
        for part, recorder in zip(self._parts, recorders, strict=True):
            part.record(recorder)


class _Part:
    """What one device does in a step: its table there, and its graph once it is recorded."""

    def __init__(
        self, forward: Forward, cache: Cache, rows: int, pages: int, device: torch.device
    ) -> None:
        self._forward = forward
        self._table_BX = torch.zeros(rows, COLUMNS + pages, dtype=torch.long, device=device)
        _, lengths_B, slots_B = self._table_BX[:, :COLUMNS].unbind(1)
        self._params = {
            "cache": cache,
            "sequences": FixedBatch(
                self._table_BX[:, COLUMNS:], slots_B, pages * PAGE_SIZE, first_place=None
            ),
            "cache_seqlens": lengths_B,
        }
        self._input: Tensor | None = None  # token ids, or activations from the part before
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor | None = None

    def describe(self, table_BX: Tensor) -> None:
        """Copy the table to the device."""
        # The source is pageable memory, which the driver has read when the call returns.
        self._table_BX.copy_(table_BX, non_blocking=True)

    def run(self, x: Tensor | None) -> Tensor:
        """Take what the part before returned, None for the first, and return its own result."""
        if self._input is None:
            device = self._table_BX.device
            self._input = self._table_BX[:, :1] if x is None else torch.empty_like(x, device=device)
        if x is not None:
            # Queued on both devices: behind what makes x, and behind the last use of the buffer.
            self._input.copy_(x, non_blocking=True)
        if self._graph is None:
            return self._forward(self._input, self._params)
        assert self._result is not None
        self._graph.replay()
        return self._result

    def record(self, recorder: _Recorder) -> None:
        """Capture what `run` does; nothing is executed."""
        assert self._input is not None
        self._graph, self._result = recorder.record(
            partial(self._forward, self._input, self._params)
        )
