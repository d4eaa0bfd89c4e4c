"""The progress of a job on a terminal: a line per linear and per module, a bar with the ETA."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from .fidelity import Fidelity
from .reports import LinearReport, ModuleReport

_ETA_MODULES = 8
"""The estimate looks at the last quantized modules; the first ones are not typical."""


class _Countdown(ProgressColumn):
    """The estimate of the time left, running down between modules.

    It never falls below what the modules after the present one will take.
    """

    def render(self, task: Task) -> Text:
        finish, rest = task.fields["estimate"]
        if finish is None:
            return Text("")
        return Text(f"ETA {_clock(max(finish - time.monotonic(), rest))}")


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
                _Countdown(),
                TimeElapsedColumn(),
                TextColumn("elapsed"),
                console=self._console,
                transient=True,
            )
            self._modules = self._progress.add_task(
                "modules", total=skipped + len(weights), completed=skipped, estimate=(None, 0)
            )
            self._stage = self._progress.add_task("", total=1, estimate=(None, 0))
            self._progress.start()

    def stage(self, key: str, name: str, total: float) -> None:
        if self._progress is not None and self._stage is not None:
            self._progress.reset(self._stage, total=total, description=f"{key}: {name}")

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
        left = self._left()
        if left is not None:
            parts.append(f"ETA {_clock(sum(left))}")
        self.message("-- " + "  ".join(parts))
        if self._progress is not None and self._modules is not None:
            estimate = (None, 0) if left is None else (now + sum(left), sum(left[1:]))
            self._progress.update(self._modules, completed=self._done, estimate=estimate)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _left(self) -> list[float] | None:
        """Seconds that each module still needs, at the pace of the last quantized ones, everything
        about them included; None where nothing is known or left."""
        recent = self._pace[-_ETA_MODULES:]
        if not sum(self._weights.values()) or not recent:
            return None
        per_weight = sum(seconds for seconds, _ in recent) / sum(weights for _, weights in recent)
        return [weights * per_weight for weights in self._weights.values()]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
