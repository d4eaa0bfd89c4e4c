#!/usr/bin/env python3
"""Speed of the packed linear, decode and reconstruct on the CPU.

    python benchmarks/codec_cpu.py                       # the best instruction set of this CPU
    EXLLAMAV3_ISA=avx2 python benchmarks/codec_cpu.py    # or portable
    python benchmarks/codec_cpu.py --threads 1 2 4 --size 8192

Billions of weights a second (each weight of the matrix counts once a call, whatever the number of
rows), the best of several runs; the weight is larger than L2, so it comes from L3 or memory.
With one thread CPU time is taken, so that a busy machine disturbs it little; with more it is wall
time, and a busy machine needs more `--seconds` for its best moment.
For comparison, what a float32 matrix of the same size does in `torch.matmul`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from exllamav3.codec.params import Codebook
from exllamav3.ops import build_info, decode, exl3_linear, reconstruct, require_native

RATES = (1, 2, 3, 4, 5, 6, 8)
ROWS = (1, 4, 16, 64, 256)


def best_seconds(function: Callable[[], object], threads: int, seconds: float) -> float:
    """Least time of one call, over at least 5 calls and so many seconds."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    function()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        start = clock()
        function()
        times.append(clock() - start)
    return min(times)


class Bench:
    """A square weight of random bits and the measurements on it."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self.generator = torch.Generator().manual_seed(0)
        self.suh, self.svh = (torch.randn(size, generator=self.generator).half() for _ in "ab")

    def trellis(self, bits: float) -> torch.Tensor:
        shape = (self.size // 16, self.size // 16, int(16 * bits))
        return torch.randint(-32768, 32768, shape, generator=self.generator).to(torch.int16)

    def rate(self, function: Callable[[], object], threads: int) -> float:
        """Billion weights a second."""
        torch.set_num_threads(threads)
        return self.size**2 / best_seconds(function, threads, self.seconds) / 1e9

    def linear(self, bits: float, codebook: Codebook, rows: int, threads: int) -> float:
        trellis = self.trellis(bits)
        x = torch.randn(rows, self.size, generator=self.generator)
        return self.rate(
            lambda: exl3_linear(x, trellis, self.suh, self.svh, None, codebook), threads
        )

    def dense(self, rows: int, threads: int) -> float:
        weight = torch.randn(self.size, self.size, generator=self.generator)
        x = torch.randn(rows, self.size, generator=self.generator)
        return self.rate(lambda: x @ weight, threads)


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096, help="k and n (default 4096)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.2, help="for each number")
    args = parser.parse_args()
    require_native("linear", "cpu")
    print(build_info())
    bench = Bench(args.size, args.seconds)

    rows = [
        [str(bits), str(threads)]
        + [f"{bench.linear(bits, codebook, 1, threads):.2f}" for codebook in Codebook]
        for bits in RATES
        for threads in args.threads
    ]
    table(
        "Packed linear, one row, Gweights/s", ["K", "threads", *(c.value for c in Codebook)], rows
    )

    rows = []
    for count in ROWS:
        for threads in args.threads:
            packed = bench.linear(4, Codebook.MUL1, count, threads)
            dense = bench.dense(count, threads)
            gflops = [f"{2 * count * value:.0f}" for value in (packed, dense)]
            rows.append([str(count), str(threads), f"{packed:.2f}", f"{dense:.2f}", *gflops])
    table(
        "By rows, K = 4, mul1: Gweights/s, and as GFLOP/s",
        ["rows", "threads", "packed", "float32 matmul", "packed GFLOP/s", "matmul GFLOP/s"],
        rows,
    )

    trellis = bench.trellis(4)
    rows = []
    for threads in args.threads:
        inner = bench.rate(lambda: decode(trellis, Codebook.MUL1), threads)
        whole = bench.rate(
            lambda: reconstruct(trellis, bench.suh, bench.svh, Codebook.MUL1), threads
        )
        rows.append([str(threads), f"{inner:.2f}", f"{whole:.2f}"])
    table(
        "To a matrix, K = 4, mul1, Gweights/s",
        ["threads", "decode (float16)", "reconstruct (float32)"],
        rows,
    )


if __name__ == "__main__":
    main()
