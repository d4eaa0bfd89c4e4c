#!/usr/bin/env python3
"""Speed of quantizing on a GPU: the tile quantizer by rate, and one whole matrix.

    python benchmarks/quantize.py              # tables on stdout
    python benchmarks/quantize.py --quick      # fewer shapes
    python benchmarks/quantize.py --parts      # only what the time of a matrix consists of

Tile quantizer: medians of CUDA-graph replays, Gaussian tiles at the scale of the codebook. The
batches are those of error feedback, which searches one row of n/16 tiles a call, and one large
batch. Matrix: `quantize_linear` with a Hessian, wall clock with a synchronised device, the first
run of the table not counted; peak memory besides the weight and its Hessian.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from gpu_timing import environment, need_gpus

import exllamav3_ext
from exllamav3.codec.params import Codebook
from exllamav3.ops import quantize_tiles
from exllamav3.quant import QuantSettings, make_hessian, quantize, quantize_linear

BATCHES = (384, 896, 4224)  # 6144/16, 14336/16, and 16 waves of two tiles a multiprocessor


def graph_ms(function, repeats: int = 9) -> float:
    """Median milliseconds of a captured call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def tile_table(rates: tuple[int, ...]) -> None:
    print("\ntile quantizer, mul1: million weights a second (milliseconds) by tiles in a call")
    print("| K | " + " | ".join(str(count) for count in BATCHES) + " | NMSE |")
    print("|---|" + "---|" * (len(BATCHES) + 1))
    for bits in rates:
        scale = 1.24371088 * {1: 0.85, 2: 0.75, 3: 0.75, 4: 0.72}.get(bits, 0.68)
        generator = torch.Generator("cuda").manual_seed(bits)
        tiles = scale * torch.randn(max(BATCHES), 256, device="cuda", generator=generator)
        cells = []
        for count in BATCHES:
            part = tiles[:count]
            ms = graph_ms(lambda part=part, bits=bits: quantize_tiles(part, bits, Codebook.MUL1))
            cells.append(f"{count * 256 / ms / 1e3:.0f} ({ms:.2f})")
        values = quantize_tiles(tiles[:2048], bits, Codebook.MUL1)[0]
        part = tiles[:2048]
        nmse = ((values - part).square().sum() / part.square().sum()).item()
        print(f"| {bits} | " + " | ".join(cells) + f" | {nmse:.6f} |", flush=True)


def matrix_table(shapes: tuple[tuple[int, int], ...], rates: tuple[int, ...]) -> None:
    print("\nwhole matrix with Hessian, mul1: seconds (proxy error, working memory in GB)")
    print("| in x out | " + " | ".join(f"K={bits}" for bits in rates) + " |")
    print("|---|" + "---|" * len(rates))
    repeats = 2
    for rows, columns in shapes:
        generator = torch.Generator("cuda").manual_seed(0)
        mixing = torch.randn(rows, rows, device="cuda", generator=generator) / rows**0.5
        inputs = torch.randn(4 * rows, rows, device="cuda", generator=generator) @ mixing
        matrix = inputs.T @ inputs / len(inputs)
        hessian = make_hessian(matrix, len(inputs), seed=0)
        del mixing, inputs, matrix
        weight = torch.randn(rows, columns, device="cuda", generator=generator) / rows**0.5
        cells = []
        for bits in rates:
            settings = QuantSettings(bits=bits, codebook=Codebook.MUL1, out_scales=True, seed=0)
            for _ in range(repeats):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                start = time.perf_counter()
                _, report = quantize_linear(weight, hessian, settings)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
            repeats = 1
            peak = (torch.cuda.max_memory_allocated() - held) / 1e9
            cells.append(f"{seconds:.2f} ({report.proxy_error:.2e}, {peak:.1f})")
        print(f"| {rows} x {columns} | " + " | ".join(cells) + " |", flush=True)


def parts_table(shapes: tuple[tuple[int, int], ...]) -> None:
    """Seconds of the steps of `quantize_linear`, each with a synchronised device."""
    seconds: dict[str, float] = {}

    def timed(name, function):
        def run(*args, **kwargs):
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - start
            return result

        return run

    steps = {
        "coding": "quantize_with_feedback",
        "refit": "refit_scales",
        "errors": "weight_errors",
        "scales": "regularize",
        "sample": "_sample",
        "search of g": "search_scale",
        "factor": "block_ldl",
    }
    for name, function in steps.items():
        setattr(quantize, function, timed(name, getattr(quantize, function)))
    print("\nmilliseconds of a matrix with Hessian, K=4, mul1")
    print("| in x out | all | " + " | ".join(steps) + " |")
    print("|---|---|" + "---|" * len(steps))
    for rows, columns in shapes:
        inputs = torch.randn(4 * rows, rows, device="cuda")
        hessian = make_hessian(inputs.T @ inputs / len(inputs), len(inputs), seed=0)
        del inputs
        weight = torch.randn(rows, columns, device="cuda") / rows**0.5
        for _ in range(2):
            seconds.update(dict.fromkeys(steps, 0.0))
            torch.cuda.synchronize()
            start = time.perf_counter()
            quantize_linear(weight, hessian, QuantSettings(4, Codebook.MUL1))
            torch.cuda.synchronize()
            total = time.perf_counter() - start
        cells = [f"{1e3 * value:.0f}" for value in (total, *seconds.values())]
        print(f"| {rows} x {columns} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    need_gpus()
    print(f"{environment()}, archs {exllamav3_ext.build_info().get('archs')}")
    if args.parts:
        parts_table(((5120, 1024), (5120, 14336), (5120, 17408), (17408, 5120)))
        return
    tile_table((2, 3, 4) if args.quick else tuple(range(1, 9)))
    if args.quick:
        matrix_table(((5120, 14336),), (4,))
    else:
        matrix_table(((4096, 6144), (5120, 14336)), (2, 3, 4, 6))
        matrix_table(((5120, 151936),), (6,))  # a head: many chunks of columns


if __name__ == "__main__":
    main()
