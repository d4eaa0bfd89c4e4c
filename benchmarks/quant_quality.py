#!/usr/bin/env python3
"""Quality of the quantizer on real attention weights, as a table in Markdown.

    python benchmarks/quant_quality.py                    # everything: 10 minutes on 2 cores
    python benchmarks/quant_quality.py --bits 4 --seeds 1 --layers 3

Cases: q, k and v of two layers of a public 0.5 B model with the second moments of their input
over 24,576 tokens (tests/data/quant_cases.safetensors), each matrix by itself and the three
fused into one. Measure: proxy error tr(E^T H E) / tr(W^T H W) of the tensors as stored. The
reference values are those of the established EXL3 quantizer on the same cases: `default`, and
`scaled` for its option that factors the exact metric.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from exllamav3.codec.params import Codebook
from exllamav3.ops import build_info
from exllamav3.quant import (
    QuantSettings,
    concat_qkv,
    make_hessian,
    pad_weight,
    quantize_linear,
    split_qkv,
)

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
LAYERS = (3, 12)
PARTS = ("q_proj", "k_proj", "v_proj", "fused_qkv")
RATES = (2, 3, 4, 5, 6)
SEEDS = 4
FUSED_LIMIT_AT_4_BITS = {3: 4.85e-4, 12: 5.95e-4}


@dataclass(frozen=True)
class Case:
    """One matrix at one rate, and what the established quantizer reaches on it."""

    layer: int
    part: str
    bits: int
    default: float
    scaled: float | None

    @property
    def name(self) -> str:
        return f"layer {self.layer} {self.part} K={self.bits}"

    @property
    def limit(self) -> float:
        """Largest acceptable mean over seeds."""
        if self.scaled is not None:
            return self.scaled * (1.04 if (self.part, self.bits) == ("k_proj", 3) else 1.02)
        if self.part == "fused_qkv" and self.bits == 4:
            return FUSED_LIMIT_AT_4_BITS[self.layer]
        return self.default * 0.95

    @property
    def single_limit(self) -> float:
        """Largest acceptable error of one seed."""
        return 1.05 * self.scaled if self.scaled is not None else self.limit


class Source:
    """The stored weights and second moments."""

    def __init__(self) -> None:
        self._tensors = load_file(DATA / "quant_cases.safetensors")
        self._errors = json.loads((DATA / "quant_cases.json").read_text(encoding="utf-8"))

    def case(self, layer: int, part: str, bits: int) -> Case:
        key = f"l{layer}.{part}.K{bits}.mul1"
        scaled = self._errors.get(f"{key}.scaledH")
        return Case(
            layer, part, bits, self._errors[key]["proxy"], scaled["proxy"] if scaled else None
        )

    def weight(self, layer: int, part: str) -> Tensor:
        """BF16 ``(out, in)``."""
        if part == "fused_qkv":
            return concat_qkv([self.weight(layer, name) for name in PARTS[:3]])
        return self._tensors[f"l{layer}.{part}.weight"]

    def second_moments(self, layer: int) -> Tensor:
        """Float32 ``(896, 896)``, stored as its upper triangle."""
        upper = self._tensors[f"l{layer}.attn_in.H_upper"]
        size = int((2 * upper.numel()) ** 0.5)
        matrix = torch.zeros(size, size)
        rows, columns = torch.triu_indices(size, size)
        matrix[rows, columns] = upper
        matrix[columns, rows] = upper
        return matrix


def measure(
    source: Source, case: Case, seed: int, device: str = "cpu"
) -> tuple[float, dict[str, float]]:
    """Proxy error of one case, and that of q, k and v inside a fused one."""
    weight_KN, _ = pad_weight(source.weight(case.layer, case.part))
    matrix = source.second_moments(case.layer)
    hessian = make_hessian(matrix, 24576, seed).to(device)
    settings = QuantSettings(case.bits, Codebook.MUL1, out_scales=True, seed=seed)
    tensor, report = quantize_linear(weight_KN.to(device), hessian, settings)
    if report.proxy_error is None:
        raise RuntimeError(f"{case.name}: no proxy error was measured")
    if case.part != "fused_qkv":
        return report.proxy_error, {}
    splits = [source.weight(case.layer, name).shape[0] for name in PARTS[:3]]
    decoded = split_qkv(tensor.reconstruct().T.cpu(), splits)
    originals = split_qkv(weight_KN.float().T, splits)
    inside = {}
    for name, w_OI, decoded_OI in zip(PARTS, originals, decoded, strict=False):
        e_OI = w_OI - decoded_OI
        inside[name] = float(((e_OI @ matrix) * e_OI).sum() / ((w_OI @ matrix) * w_OI).sum())
    return report.proxy_error, inside


def cases(source: Source, layers: list[int], rates: list[int]) -> Iterator[Case]:
    for layer in layers:
        for bits in rates:
            for part in PARTS:
                yield source.case(layer, part, bits)


def row(case: Case, errors: list[float]) -> str:
    mean, worst = statistics.mean(errors), max(errors)
    fine = mean <= case.limit and worst <= case.single_limit
    scaled = f"{case.scaled:.3e}" if case.scaled else "-"
    return (
        f"| {case.layer} | {case.part} | {case.bits} | {mean:.3e} | {worst:.3e} | "
        f"{case.default:.3e} ({mean / case.default:.3f}) | {scaled}"
        + (f" ({mean / case.scaled:.3f})" if case.scaled else "")
        + f" | {'yes' if fine else 'NO'} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=list(RATES), choices=RATES)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    arguments = parser.parse_args()
    info = build_info()
    where = info["isa"] if info["native"] else "references"
    if arguments.device != "cpu":
        where = torch.cuda.get_device_name(arguments.device)
    print(f"torch {info['torch']}, {where}, mul1, ")
    print(f"{arguments.seeds} seeds. In brackets: our mean over the reference.\n")
    print("| layer | matrix | K | mean | worst | default | scaled | in bounds |")
    print("|---|---|---|---|---|---|---|---|")
    source, started, missed, inside_fused = Source(), time.perf_counter(), 0, []
    for case in cases(source, arguments.layers, arguments.bits):
        results = [measure(source, case, seed, arguments.device) for seed in range(arguments.seeds)]
        line = row(case, [error for error, _ in results])
        missed += line.endswith("NO |")
        print(line, flush=True)
        if case.part == "fused_qkv":
            parts = {p: statistics.mean(inside[p] for _, inside in results) for p in PARTS[:3]}
            inside_fused.append((case, parts))
    print("\n| layer | K | inside fused: q | k | v |\n|---|---|---|---|---|")
    for case, parts in inside_fused:
        cells = " | ".join(f"{parts[name]:.3e}" for name in parts)
        print(f"| {case.layer} | {case.bits} | {cells} |")
    print(f"\n{time.perf_counter() - started:.0f} s", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
