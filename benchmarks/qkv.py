#!/usr/bin/env python3
"""Speed of the q/k/v projections of one attention block on a GPU: fused, split, grouped, cuBLAS.

    python benchmarks/qkv.py              # all tables
    python benchmarks/qkv.py --quick      # decode of geometry A and B at K=4 only

Microseconds: medians of CUDA-graph replays. Weights are rotated over enough copies that none
is found in the L2 cache, so every number includes reading the weight from memory. "three" is
three linears one after the other, "grouped" one launch over the same three payloads, "fused"
one linear of the summed width; cuBLAS multiplies BF16 matrices of the same shape.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_timing import environment, need_gpus
from torch import Tensor

import exllamav3_ext
from exllamav3.codec.params import Codebook
from exllamav3.ops import exl3_linear, exl3_linear_group
from exllamav3.ops.matrix_product import linear_by_matrix

ROTATED_BYTES = 300e6
"""Copies of a weight add up to this, several times the L2 cache of any card."""


@dataclass(frozen=True)
class Geometry:
    name: str
    k: int
    widths: tuple[int, int, int]

    @property
    def n(self) -> int:
        return sum(self.widths)


A = Geometry("A", 5120, (12288, 1024, 1024))
B = Geometry("B", 4096, (4096, 1024, 1024))
CASES = (
    (A, 4, Codebook.MUL1), (A, 4, Codebook.MCG), (A, 3, Codebook.MUL1), (A, 6, Codebook.MUL1),
    (A, 8, Codebook.MUL1), (B, 4, Codebook.MUL1),
)  # fmt: skip
TARGETS = {  # at most (aim), microseconds, fused at 1 and 16 rows
    ("A", 4, "mul1"): ((20, 14), (28, 22)), ("A", 4, "mcg"): ((26, 18), (32, 26)),
    ("A", 3, "mul1"): ((20, 14), (28, 22)), ("A", 6, "mul1"): ((25, 18), (31, 25)),
    ("A", 8, "mul1"): ((30, 22), (35, 28)), ("B", 4, "mul1"): ((12, 8), (15, 11)),
}  # fmt: skip


class Packed:
    """Copies of one random packed weight."""

    def __init__(self, k: int, n: int, bits: int, codebook: Codebook, copies: int):
        shape = (k // 16, n // 16, 16 * bits)
        self.trellis = [
            torch.randint(-32768, 32768, shape, device="cuda", dtype=torch.int16)
            for _ in range(copies)
        ]
        self.suh = (torch.randn(k, device="cuda") / k**0.5).half()
        self.svh = torch.randn(n, device="cuda").half()
        self.codebook = codebook

    def __call__(self, x: Tensor, i: int) -> Tensor:
        return exl3_linear(x, self.trellis[i], self.suh, self.svh, None, self.codebook)


def grouped(members: list[Packed], x: Tensor, i: int) -> list[Tensor]:
    return exl3_linear_group(
        x,
        [m.trellis[i] for m in members],
        [m.suh for m in members],
        [m.svh for m in members],
        [m.codebook for m in members],
    )


def microseconds(function: Callable[[int], object], copies: int, rounds: int = 3) -> float:
    """Median time of one call, from replays of a graph of calls over all copies."""
    function(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(copies):
                function(i)
    times = []
    for _ in range(15):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * copies))
    return statistics.median(times)


def copies_of(size_bytes: float) -> int:
    return max(3, round(ROTATED_BYTES / size_bytes))


def cublas(geometry: Geometry, rows: int) -> float:
    copies = copies_of(2 * geometry.k * geometry.n)
    x = torch.randn(rows, geometry.k, device="cuda", dtype=torch.bfloat16)
    matrices = [
        torch.randn(geometry.k, geometry.n, device="cuda", dtype=torch.bfloat16)
        for _ in range(copies)
    ]
    return microseconds(lambda i: x @ matrices[i], copies)


def decode_table(cases: tuple, row_counts: tuple[int, ...]) -> None:
    print(
        "\n| case | rows | fused | target | three | grouped | three/fused | grouped/fused | BF16 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    dense = {(g, rows): cublas(g, rows) for g in {case[0] for case in cases} for rows in row_counts}
    for geometry, bits, codebook in cases:
        copies = copies_of(geometry.k * geometry.n * bits / 8)
        fused = Packed(geometry.k, geometry.n, bits, codebook, copies)
        split = [Packed(geometry.k, n, bits, codebook, copies) for n in geometry.widths]
        for rows in row_counts:
            x = torch.randn(rows, geometry.k, device="cuda", dtype=torch.float16)
            one = microseconds(lambda i, x=x, fused=fused: fused(x, i), copies)
            three = microseconds(lambda i, x=x, split=split: [m(x, i) for m in split], copies)
            group = microseconds(lambda i, x=x, split=split: grouped(split, x, i), copies)
            name = f"{geometry.name} K{bits} {codebook.value}"
            targets = TARGETS[geometry.name, bits, codebook.value]
            target = {1: targets[0], 16: targets[1]}.get(rows)
            print(
                f"| {name} | {rows} | {one:.1f} | {f'{target[0]} ({target[1]})' if target else ''} "
                f"| {three:.1f} | {group:.1f} | {three / one:.2f} | {group / one:.2f} "
                f"| {dense[geometry, rows]:.1f} |",
                flush=True,
            )


def mixed_table(row_counts: tuple[int, ...]) -> None:
    print("\nq K4 mul1, k K6 mcg, v K8 mul1 (geometry A): three rates, two codebooks, one launch\n")
    print("| rows | three | grouped |\n|---|---|---|")
    rates = ((4, Codebook.MUL1), (6, Codebook.MCG), (8, Codebook.MUL1))
    copies = copies_of(A.k * A.n / 2)
    members = [
        Packed(A.k, n, bits, book, copies) for n, (bits, book) in zip(A.widths, rates, strict=True)
    ]
    for rows in row_counts:
        x = torch.randn(rows, A.k, device="cuda", dtype=torch.float16)
        three = microseconds(lambda i, x=x: [m(x, i) for m in members], copies)
        group = microseconds(lambda i, x=x: grouped(members, x, i), copies)
        print(f"| {rows} | {three:.1f} | {group:.1f} |", flush=True)


def prefill_table() -> None:
    print("\nGeometry A, K4 mul1: packed kernel against a matrix and cuBLAS\n")
    print("| rows | packed | by matrix | BF16 alone | by matrix / BF16 |\n|---|---|---|---|---|")
    copies = copies_of(A.k * A.n / 2)
    weight = Packed(A.k, A.n, 4, Codebook.MUL1, copies)
    book = weight.codebook.id
    for rows in (32, 64, 80, 96, 112, 128, 256, 512, 1024, 2048, 8192):
        x = torch.randn(rows, A.k, device="cuda", dtype=torch.float16)

        def packed(i: int, x: Tensor = x) -> Tensor:
            return torch.ops.exllamav3.linear(
                x, weight.trellis[i], weight.suh, weight.svh, None, book, torch.float16
            )

        def by_matrix(i: int, x: Tensor = x) -> Tensor:
            trellis, suh, svh = weight.trellis[i], weight.suh, weight.svh
            return linear_by_matrix(x, trellis, suh, svh, None, book, torch.float16)

        direct = f"{microseconds(packed, copies, 1):.1f}" if rows <= 256 else ""
        matrix, dense = microseconds(by_matrix, copies, 1), cublas(A, rows)
        print(
            f"| {rows} | {direct} | {matrix:.1f} | {dense:.1f} | {matrix / dense:.2f} |", flush=True
        )


def matrix_table() -> None:
    print("\nGeometry A, from packed to a float16 matrix, mul1\n")
    print("| K | decode | reconstruct | reconstruct_columns |\n|---|---|---|---|")
    for bits in (2, 3, 4, 6, 8):
        copies = copies_of(A.k * A.n * bits / 8)
        weight = Packed(A.k, A.n, bits, Codebook.MUL1, copies)
        scales = (weight.suh, weight.svh, 2)

        def of(op: Callable[..., Tensor], *rest: object, weight=weight, copies=copies) -> float:
            return microseconds(lambda i: op(weight.trellis[i], *rest), copies, 1)

        ops = torch.ops.exllamav3
        cells = (
            of(ops.decode, 2),
            of(ops.reconstruct, *scales, torch.float16),
            of(ops.reconstruct_columns, *scales),
        )
        print(f"| {bits} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="decode at K=4 mul1 only")
    quick = parser.parse_args().quick
    need_gpus()
    print(f"{environment()}, archs {exllamav3_ext.build_info().get('archs')}")
    if quick:
        decode_table((CASES[0], CASES[-1]), (1, 16))
        return
    decode_table(CASES, (1, 2, 4, 8, 16, 32, 64))
    mixed_table((1, 4, 16))
    prefill_table()
    matrix_table()


if __name__ == "__main__":
    main()
