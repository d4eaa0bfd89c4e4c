#!/usr/bin/env python3
"""Quality of a real 135 M-parameter Llama model, converted in several ways.

    python benchmarks/results_smollm2.py MODEL_DIR [--device cuda:0]

MODEL_DIR is what `benchmarks/smollm2.py` makes. Writes the section "smollm2", or on a GPU
"smollm2-gpu", of docs/results.md, after each variant anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from exllamav3.conversion import ConversionOptions
from results_table import (
    ROOT,
    Measured,
    Variant,
    attention_layers,
    environment,
    fused_row,
    measure,
    table,
    write_section,
)

MODEL = ROOT / "results-output" / "SmolLM2-135M"
WORK = ROOT / "results-output" / "smollm2"
ROWS, COLS = 16, 1024


def mixed_rows(layers: list[str]) -> list[dict[str, object]]:
    """Every other block fused at 4 bits, the others split with more bits for k and v."""
    rows: list[dict[str, object]] = []
    for number, layer in enumerate(layers):
        if number % 2 == 0:
            rows.append(fused_row(layer, 4))
        else:
            rates = (("q_proj", 4), ("k_proj", 5), ("v_proj", 6))
            projections = [{"name": name, "K": bits} for name, bits in rates]
            rows.append({"layer": layer, "variant": "split", "projections": projections})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", type=Path, default=MODEL, help="made by benchmarks/smollm2.py"
    )
    parser.add_argument("--device", default="cpu", help="cpu (default) or a GPU such as cuda:0")
    parser.add_argument("--cal-rows", type=int, default=64, help="rows of 512 tokens (default 64)")
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        sys.exit(
            f"{arguments.model}: no model there; make it with: python benchmarks/smollm2.py "
            f"{arguments.model}"
        )
    layers = attention_layers(arguments.model)
    variants = [
        Variant("4 bits, all split", 4.0),
        Variant("4 bits, all fused (K=4)", 4.0, [fused_row(layer, 4) for layer in layers]),
        Variant("4 bits, half fused, half q 4, k 5, v 6", 4.0, mixed_rows(layers)),
        Variant("3 bits, all split", 3.0),
    ]
    options = ConversionOptions(
        in_dir=str(arguments.model),
        work_dir=str(WORK),
        out_dir=str(WORK / "out"),
        bits=4.0,
        cal_rows=arguments.cal_rows,
        cal_cols=512,
        devices=(arguments.device,),
    )
    start = time.monotonic()

    def publish(measured: Sequence[Measured]) -> None:
        name = "smollm2" if arguments.device == "cpu" else "smollm2-gpu"
        write_section(name, section(measured, arguments, time.monotonic() - start))

    measure(arguments.model, WORK, variants, options, ROWS, COLS, publish)
    return 0


def section(measured: Sequence[Measured], arguments: argparse.Namespace, seconds: float) -> str:
    rows = arguments.cal_rows
    place = "a CPU" if arguments.device == "cpu" else "a GPU"
    return f"""## SmolLM2-135M-Instruct on {place}

Llama architecture, 30 blocks, hidden 576 (padded to 640), 9 heads and 3 key/value heads of 64; made
by `benchmarks/smollm2.py`. **Its weights were 4-bit once** (Q4_1, then BF16), so the table compares
conversions with each other; it says nothing about the original model. Options
`-hb 6 -cr {rows} -cc 512 -cb mul1 --out_scales always`, measured on the first {ROWS}
rows of {COLS} tokens of `examples/text/evaluation.txt`.

{table(measured)}

Measured on {environment(arguments.device)}; {seconds:.0f} s in all."""


if __name__ == "__main__":
    sys.exit(main())
