#!/usr/bin/env python3
"""Decode of one model on one GPU, and cut in the middle over two.

    python benchmarks/layer_split.py

The model, the steps and what "eager" and "graph" mean are those of benchmarks/decode.py.
"""

from __future__ import annotations

import argparse
import time

import torch
from decode import GpuSource, make_model, step_us
from gpu_timing import environment, need_gpus

from exllamav3 import Model

BOTH = ("cuda:0", "cuda:1")
ON_THE_FIRST = 3
"""Top-level modules on the first GPU: the embedding and two of the four layers."""


def on_two_gpus(model: Model, source: GpuSource) -> None:
    """Load a model cut behind its second layer."""
    first = sum(t.total_bytes(source, torch.float16) for t in model.modules[:ON_THE_FIRST])
    model.load(source=source, devices=BOTH, use_per_device=[(first + 1) / 2**30, 1000.0])
    assert [str(device) for device in model.devices] == list(BOTH)


def crossing_us(count: int = 200) -> float:
    """Microseconds of a copy of 5120 activations to the other GPU, waiting for each other."""
    here, there = (torch.zeros(1, 1, 5120, device=device) for device in BOTH)
    for timed in (False, True):
        for device in BOTH:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(count if timed else 3):
            there.copy_(here, non_blocking=True)
            here.copy_(there, non_blocking=True)
        for device in BOTH:
            torch.cuda.synchronize(device)
    return 1e6 * (time.perf_counter() - start) / (2 * count)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    need_gpus(2)
    peers = torch.cuda.can_device_access_peer(0, 1)
    print(f"{environment()}; the GPUs {'see' if peers else 'do not see'} each other's memory")
    print("| GPUs | rows | eager, us a step | graph, us a step |")
    print("|---|---|---|---|")
    for gpus, load in ((1, None), (2, on_two_gpus)):
        model = make_model("auto", None, load)
        for rows in (1, 16):
            eager, graph = (step_us(model, rows, capture, 30) for capture in (None, True))
            print(f"| {gpus} | {rows} | {eager:.0f} | {graph:.0f} |", flush=True)
        del model
    print(f"one crossing: {crossing_us():.1f} us")


if __name__ == "__main__":
    main()
