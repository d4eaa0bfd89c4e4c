#!/usr/bin/env python3
"""Speed and error of the tile quantizer on the CPU, by rate.

    python benchmarks/tiles_cpu.py                       # the best instruction set of this CPU
    EXLLAMAV3_ISA=avx2 python benchmarks/tiles_cpu.py    # or portable

Gaussian tiles at the scale where the codebook has its least error. Speed is the best of several
wall-clock runs, in million weights a second; "8 tiles" is what error feedback asks of a matrix of
128 columns in one call, and 64 a call in which the threads' shares are even. NMSE is over
`--tiles` tiles and depends on nothing but them.
"""

from __future__ import annotations

import argparse
import time

import torch

from exllamav3.codec.params import Codebook
from exllamav3.ops import build_info, quantize_tiles, require_native

BEST_SCALE = {1: 0.9, 2: 0.77, 3: 0.75, 4: 0.73, 5: 0.68, 6: 0.66, 7: 0.62, 8: 0.6}
"""Standard deviation of the tiles, in units of 1.24371088, the one of codebook 3inst."""


def gaussian_tiles(bits: int, count: int) -> torch.Tensor:
    """Standard normal tiles at the best scale of codebook mul1."""
    generator = torch.Generator().manual_seed(bits)
    scale = 1.24371088 * BEST_SCALE[bits]
    return scale * torch.randn(count, 256, generator=generator)


def million_weights_a_second(tiles: torch.Tensor, bits: int, threads: int, repeats: int) -> float:
    """Best speed of one call."""
    torch.set_num_threads(threads)
    quantize_tiles(tiles, bits, Codebook.MUL1)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        quantize_tiles(tiles, bits, Codebook.MUL1)
        best = min(best, time.perf_counter() - start)
    return tiles.numel() / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="*", default=list(range(1, 9)))
    parser.add_argument("--tiles", type=int, default=512, help="tiles for the error")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    require_native("quantize_tiles", "cpu")
    print(f"{build_info()}\n")
    columns = [(1, 64), (2, 64), (1, 8), (2, 8)]
    names = [f"{threads} thread{'s' * (threads > 1)}, {count} tiles" for threads, count in columns]
    print("| K | " + " | ".join(names) + " | NMSE |")
    print("|---|" + "---|" * (len(columns) + 1))
    for bits in options.bits:
        tiles = gaussian_tiles(bits, options.tiles)
        cells = [
            f"{million_weights_a_second(tiles[:count], bits, threads, options.repeats):.3f}"
            for threads, count in columns
        ]
        values, _ = quantize_tiles(tiles, bits, Codebook.MUL1)
        nmse = ((values - tiles).square().sum() / tiles.square().sum()).item()
        print(f"| {bits} | " + " | ".join(cells) + f" | {nmse:.6f} |", flush=True)


if __name__ == "__main__":
    main()
