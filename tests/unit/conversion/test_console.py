"""What people see of a job: the times and the estimate count the same seconds."""

from __future__ import annotations

import io
import re

import pytest
from exllamav3.conversion import console
from exllamav3.conversion.reports import ModuleReport
from rich.console import Console


@pytest.fixture
def clock(monkeypatch):
    """Seconds on the wall, moved by hand."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def listen(weights, skipped=0):
    out = io.StringIO()
    listener = console.ConsoleListener(console=Console(file=out, highlight=False, soft_wrap=True))
    listener.start(weights, skipped)
    return listener, out


def test_the_two_times_beside_a_bar_can_be_told_apart(clock):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80, color_system=None)
    listener = console.ConsoleListener(console=terminal)
    listener.start({"layers.0": 10, "layers.1": 10}, 0)
    clock[0] += 20
    listener.module(module("layers.0"), None, False)
    listener.stop()
    assert re.search(r"modules .*ETA 0:00:20 \d:\d\d:\d\d elapsed", out.getvalue())


def test_the_estimate_beside_a_bar_runs_down_but_not_below_what_later_modules_take(clock):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80, color_system=None)
    listener = console.ConsoleListener(console=terminal)
    listener.start({"layers.0": 10, "layers.1": 10, "layers.2": 10}, 0)
    clock[0] += 20
    listener.module(module("layers.0"), None, False)
    shown = []
    for later in (15, 60):
        clock[0] += later
        out.truncate(0)
        listener._progress.refresh()  # as it does by itself several times a second
        shown.append(eta_seconds(out.getvalue()))
    listener.stop()
    assert shown == [25, 20]


def module(key: str, seconds: float = 0.5) -> ModuleReport:
    return ModuleReport(key, (), 0.0, (), seconds)


def eta_seconds(line: str) -> int | None:
    found = re.search(r"ETA (\d+):(\d\d):(\d\d)", line)
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    return 3600 * hours + 60 * minutes + seconds


def test_seconds_of_a_module_are_all_seconds_since_the_one_before(clock):
    listener, out = listen({"embed": 0, "layers.0": 10, "layers.1": 10, "head": 30})
    for key, seconds in (("embed", 1.0), ("layers.0", 7.5), ("layers.1", 8.5), ("head", 24.0)):
        clock[0] += seconds
        listener.module(module(key), None, False)
    lines = out.getvalue().splitlines()
    assert [re.findall(r"\d+\.\d s", s)[0] for s in lines] == ["1.0 s", "7.5 s", "8.5 s", "24.0 s"]


def test_the_estimate_goes_by_weights_and_the_same_seconds(clock):
    listener, out = listen({"embed": 0, "layers.0": 10, "layers.1": 10, "head": 30})
    clock[0] += 50
    listener.module(module("embed"), None, False)
    for key in ("layers.0", "layers.1", "head"):
        clock[0] += 20 if key != "head" else 60
        listener.module(module(key, seconds=1.0), None, False)
    etas = [eta_seconds(line) for line in out.getvalue().splitlines()]
    assert etas == [None, 80, 60, None]


def test_modules_of_an_earlier_run_do_not_count_in_the_estimate(clock):
    listener, out = listen({"layers.3": 0, "layers.4": 10, "layers.5": 10}, skipped=3)
    clock[0] += 1
    listener.module(module("layers.3"), None, True)
    clock[0] += 20
    listener.module(module("layers.4"), None, False)
    resumed, made = out.getvalue().splitlines()
    assert resumed.endswith("resumed")
    assert made.endswith("20.0 s  ETA 0:00:20")
