"""What the GPU benchmarks share: medians of events, graphs, kernels by time, the environment."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch


def need_gpus(count: int = 1) -> None:
    """End the program with a sentence where there are fewer."""
    found = torch.cuda.device_count()
    if found < count:
        sys.exit(
            f"this benchmark needs {count} NVIDIA GPU{'s' if count > 1 else ''} and a CUDA build "
            f"of torch; torch {torch.__version__} sees {found}"
        )


def events(function: Callable[[], object], count: int) -> float:
    """Median microseconds of a call on the GPU."""
    for _ in range(3):
        function()
    times = []
    for _ in range(count):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def graph_of(function: Callable[[], object]) -> Callable[[], object]:
    """Replays of a captured call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def kernel_rows(function: Callable[[], object], what: str) -> None:
    """Print the kernels that a call runs, by total time."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            rows.setdefault(event.name, []).append(event.device_time)
    total = sum(sum(times) for times in rows.values())
    launches = sum(len(times) for times in rows.values())
    print(f"\nkernels of {what}: {launches} launches, {total:.0f} us busy")
    for name, times in sorted(rows.items(), key=lambda entry: -sum(entry[1]))[:24]:
        print(f"{sum(times):8.1f} us {len(times):4d} x  {name[:110]}")


def environment() -> str:
    """Card, driver, versions and commit."""

    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.partition("\n")[0].strip() or "unknown"

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    root = str(Path(__file__).resolve().parents[1])
    commit = output("git", "-C", root, "rev-parse", "--short", "HEAD")
    card = torch.cuda.get_device_name()
    return f"{card}, driver {driver}, torch {torch.__version__}, commit {commit}"
