"""Running calibration rows through one module on every device of a job.

Each device holds its own copy of the module and takes one contiguous share of
the rows; results come back in row order. A job on the same devices therefore
always adds the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from exllamav3.modules.context import Capture, ForwardContext
from exllamav3.modules.module import Module, TensorSource

TOKENS_PER_BATCH = 4096
"""Rows are forwarded together up to this many tokens (at least one row)."""

Part = TypeVar("Part")
Progress = Callable[[float], None]


def no_progress(amount: float) -> None:
    """For callers that show none."""


def activation_dtype(device: torch.device) -> torch.dtype:
    """float32 on the CPU, float16 on accelerators; the residual stream is float32 on both."""
    return torch.float32 if device.type == "cpu" else torch.float16


class Replicas:
    """The same module tree once per device, without weights until `load`."""

    def __init__(
        self, build: Callable[[], Sequence[Module]], devices: Sequence[torch.device]
    ) -> None:
        """`build` makes a fresh list of top-level modules."""
        self.devices = list(devices)
        self._trees = [build() for _ in self.devices]

    @property
    def primary(self) -> Sequence[Module]:
        """Top-level modules of the first device."""
        return self._trees[0]

    def modules(self, index: int) -> list[Module]:
        """The copies of one top-level module, one per device."""
        return [tree[index] for tree in self._trees]

    def load(self, index: int, source: TensorSource) -> None:
        for module, device in zip(self.modules(index), self.devices, strict=True):
            module.load(source, device, activation_dtype(device))

    def unload(self, index: int) -> None:
        for module in self.modules(index):
            module.unload()

    def forward(
        self, index: int, rows: Sequence[Tensor], done: Progress = no_progress
    ) -> list[Tensor]:
        """Outputs of one module for each row, on the CPU.

        Args:
            rows: all of one shape, `(cols,)` ids or `(cols, hidden)`.
            done: called with the number of rows of each finished batch.
        """

        def work(slot: int, share: Sequence[Tensor]) -> list[Tensor]:
            outputs: list[Tensor] = []
            for batch in _batches(share):
                outputs.extend(_rows_of(self._forward(index, slot, batch, None)))
                done(len(batch))
            return outputs

        return [output for part in self._each(work, rows) for output in part]

    def advance(
        self, index: int, rows: Sequence[Tensor], done: Progress = no_progress
    ) -> tuple[list[Tensor], list[bool]]:
        """Outputs of one module for each row, on the CPU, and whether each is finite.

        A row's memory is taken for its output where shape and dtype allow: new memory of this
        size would take longer to come by than the copy. So the rows given are gone.
        """

        def work(slot: int, share: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
            outputs: list[Tensor] = []
            finite: list[bool] = []
            for batch in _batches(share):
                result = self._forward(index, slot, batch, None)
                finite.extend(torch.isfinite(result).flatten(1).all(1).tolist())
                outputs.extend(_replaced(row, y) for row, y in zip(batch, result, strict=True))
                done(len(batch))
            return outputs, finite

        parts = self._each(work, rows)
        return [y for part in parts for y in part[0]], [f for part in parts for f in part[1]]

    def observe(
        self,
        index: int,
        rows: Sequence[Tensor],
        captures: Sequence[Capture],
        keep: int,
        done: Progress = no_progress,
    ) -> tuple[list[bool], list[Tensor]]:
        """Forward rows for what linears see on the way.

        Args:
            captures: one per device; receives the inputs of linears.
            keep: number of rows whose outputs are wanted.

        Returns:
            Whether the output of each row is finite, and the outputs of the first `keep` rows.
        """
        wanted = {id(row) for row in rows[:keep]}

        def work(slot: int, share: Sequence[Tensor]) -> tuple[list[bool], list[Tensor]]:
            finite: list[bool] = []
            outputs: list[Tensor] = []
            for batch in _batches(share):
                result = self._forward(index, slot, batch, captures[slot])
                finite.extend(torch.isfinite(result).flatten(1).all(1).tolist())
                if any(id(row) in wanted for row in batch):
                    made = _rows_of(result)
                    outputs.extend(
                        y for row, y in zip(batch, made, strict=True) if id(row) in wanted
                    )
                done(len(batch))
            return finite, outputs

        parts = self._each(work, rows)
        return [f for part in parts for f in part[0]], [y for part in parts for y in part[1]]

    def _each(
        self, work: Callable[[int, Sequence[Tensor]], Part], rows: Sequence[Tensor]
    ) -> list[Part]:
        """Run `work(slot, its share of the rows)` for every device; results in row order."""
        count = len(self.devices)
        edges = [len(rows) * number // count for number in range(count + 1)]
        shares = [rows[start:stop] for start, stop in pairwise(edges)]
        if count == 1:
            return [work(0, shares[0])]
        with ThreadPoolExecutor(max_workers=count) as pool:
            return list(pool.map(work, range(count), shares))

    @torch.no_grad()
    def _forward(
        self, index: int, slot: int, rows: Sequence[Tensor], capture: Capture | None
    ) -> Tensor:
        device = self.devices[slot]
        batch = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, device=device)
        for place, row in zip(batch, rows, strict=True):  # no stack in memory of the CPU first
            place.copy_(row)
        ctx = ForwardContext.uncached(batch.shape[0], batch.shape[1], device)
        ctx.capture = capture
        return self._trees[slot][index].forward(batch, ctx)


def _batches(rows: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Groups of rows of at most `TOKENS_PER_BATCH` tokens, at least one row."""
    if not rows:
        return
    size = max(1, TOKENS_PER_BATCH // rows[0].shape[0])
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _replaced(row: Tensor, output: Tensor) -> Tensor:
    """The output in the row's memory, or in its own where it does not fit."""
    if row.shape == output.shape and row.dtype == output.dtype:
        return row.copy_(output)
    return output.to("cpu", copy=True)


def _rows_of(batch: Tensor) -> list[Tensor]:
    """Rows on the CPU, each with its own memory: a view would keep the whole batch alive."""
    return [row.clone() for row in batch.cpu()]
