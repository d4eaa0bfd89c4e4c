"""The progress of a job on a terminal: a line per linear and per module, a bar with the ETA."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .fidelity import Fidelity
from .reports import LinearReport, ModuleReport

_ETA_MODULES = 8
"""The estimate looks at the last quantized modules; the first ones are not typical."""


class ConsoleListener:
    """Prints a job's progress. Without a terminal only whole lines are written, no bars."""

    def __init__(self, verbose: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._verbose = verbose
        self._progress: Progress | None = None
        self._stage: TaskID | None = None
        self._modules: TaskID | None = None
        self._weights: dict[str, int] = {}
        self._done = 0
        self._pace: list[tuple[float, int]] = []
        self._last = time.monotonic()

    def message(self, text: str) -> None:
        self._console.print(text, markup=False)

    def detail(self, text: str) -> None:
        if self._verbose:
            self.message(text)

    def start(self, weights: Mapping[str, int], skipped: int) -> None:
        self._weights, self._done, self._last = dict(weights), skipped, time.monotonic()
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("elapsed"),
                console=self._console,
                transient=True,
            )
            self._modules = self._progress.add_task(
                "modules", total=skipped + len(weights), completed=skipped, note=""
            )
            self._stage = self._progress.add_task("", total=1, note="")
            self._progress.start()

    def stage(self, key: str, name: str, total: float) -> None:
        if self._progress is not None and self._stage is not None:
            self._progress.reset(self._stage, total=total, description=f"{key}: {name}", note="")

    def advance(self, amount: float) -> None:
        if self._progress is not None and self._stage is not None:
            self._progress.advance(self._stage, amount)

    def linear(self, report: LinearReport) -> None:
        self.message(report.line())

    def module(self, report: ModuleReport, fidelity: Fidelity | None, resumed: bool) -> None:
        self._done += 1
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        weights = self._weights.pop(report.key, 0)
        if weights:
            self._pace.append((seconds, weights))
        parts = [f"{report.key:<54}"]
        if report.bits:
            parts.append(f"{report.bits:5.2f} bpw")
        if fidelity is not None:
            parts.append(
                f"rel err {fidelity.relative_error:.4f}  cos err {fidelity.cosine_error:.2e}  "
                f"SQNR {fidelity.sqnr_db:5.1f} dB"
            )
        if report.bad_rows:
            parts.append(f"{len(report.bad_rows)} rows dropped (not finite)")
        parts.append("resumed" if resumed else f"{seconds:.1f} s")
        parts.append(self._eta())
        self.message("-- " + "  ".join(part for part in parts if part))
        if self._progress is not None and self._modules is not None:
            self._progress.update(self._modules, completed=self._done, note=self._eta())

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _eta(self) -> str:
        """Time left at the pace of the last quantized modules, everything about them included."""
        left = sum(self._weights.values())
        recent = self._pace[-_ETA_MODULES:]
        if not left or not recent:
            return ""
        per_weight = sum(seconds for seconds, _ in recent) / sum(weights for _, weights in recent)
        return f"ETA {_clock(left * per_weight)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
