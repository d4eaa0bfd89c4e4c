#!/usr/bin/env python3
"""Quality of the small trained model shipped with the project, converted in several ways.

    python benchmarks/results_tiny.py        (or: make results-tiny)

Writes the section "tiny" of docs/results.md; exits with 1 if a promised bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from exllamav3.conversion import ConversionOptions
from results_table import (
    ROOT,
    Measured,
    Variant,
    attention_layers,
    environment,
    fused_row,
    measure,
    missed_limits,
    table,
    write_section,
)

SOURCE = ROOT / "examples" / "tiny-qwen35-lm"
PLAN = ROOT / "examples" / "tiny-plan.json"
WORK = ROOT / "results-output" / "tiny"
ROWS, COLS = 32, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or a GPU such as cuda:0")
    device = parser.parse_args().device
    layers = attention_layers(SOURCE)
    variants = [
        Variant("4 bits, all split", 4.0, kl_limit=0.030),
        Variant("4 bits, all fused (K=4)", 4.0, [fused_row(x, 4) for x in layers], 0.032),
        Variant(
            "4 bits, one fused, one mixed (q 4, k 5, v 6)",
            4.0,
            json.loads(PLAN.read_text())["layers"],
        ),
        Variant("3 bits, all split", 3.0, kl_limit=0.12),
    ]
    options = ConversionOptions(
        in_dir=str(SOURCE),
        work_dir=str(WORK),
        out_dir=str(WORK / "out"),
        bits=4.0,
        head_bits=6,
        cal_rows=64,
        cal_cols=512,
        codebook="mul1",
        out_scales="always",
        devices=(device,),
    )

    def publish(measured: Sequence[Measured]) -> None:
        write_section("tiny", section(measured, device))

    measured = measure(SOURCE, WORK, variants, options, ROWS, COLS, publish)
    missed = missed_limits(variants, measured)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


def section(measured: Sequence[Measured], device: str) -> str:
    return f"""## tiny-qwen35-lm

4.5 M parameters, two gated-delta-net and two gated full-attention blocks; options
`-hb 6 -cr 64 -cc 512 -cb mul1 --out_scales always`, measured on the first {ROWS} rows of {COLS}
tokens of `examples/text/evaluation.txt`.

{table(measured)}

Bounds: KL at most 0.030 (4 bits, split), 0.032 (4 bits, fused), 0.12 (3 bits, split).
Measured on {environment(device)}."""


if __name__ == "__main__":
    sys.exit(main())
