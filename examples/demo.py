#!/usr/bin/env python3
"""The main job from end to end on the small model shipped with the project, on the CPU.

Converts examples/tiny-qwen35-lm at 4 bits with a plan that fuses one of its two
full-attention layers and mixes bit widths in the other, loads the result, and
compares it with its source. `make demo` runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from exllamav3 import Cache, Config, Generator, Model, Tokenizer
from exllamav3.cli.main import main as exllamav3_command

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "tiny-qwen35-lm"
PLAN = HERE / "tiny-plan.json"
EVAL_TEXT = HERE / "text" / "evaluation.txt"
OUTPUT = HERE.parent / "demo-output"
"""Belongs to this script: it is removed and made anew by each run."""

PROMPT = "It is a truth universally acknowledged, that"


def main() -> int:
    start = time.monotonic()
    if OUTPUT.exists():
        shutil.rmtree(OUTPUT)
    work, result = OUTPUT / "work", OUTPUT / "tiny-qwen35-lm-4.0bpw"

    run(
        "convert", "-i", SOURCE, "-w", work, "-o", result, "-b", "4.0", "-cr", "64", "-cc", "512",
        "--qkv-topology", PLAN, "-d", "cpu",
    )  # fmt: skip
    run(
        "eval", result, "--reference", SOURCE, "--text", EVAL_TEXT, "--rows", "16", "--cols",
        "512", "--device", "cpu",
    )  # fmt: skip

    config = Config.from_directory(result)
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=512)
    model.load(device="cpu")
    tokenizer = Tokenizer.from_config(config)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer)
    text = generator.generate(prompt=PROMPT, max_new_tokens=48, seed=1)

    print("\nGenerated:", json.dumps(text))
    print("\nRoutes taken by the attention layers while generating:")
    for key, routes in model.routes().items():
        print(f"  {key:28} " + ", ".join(f"{route} {count}" for route, count in routes.items()))
    print("\nSizes of the weights on disk:")
    for name, folder in (("source", SOURCE), ("result", result)):
        size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"  {name:8} {size_bytes / 1e6:6.2f} MB")
    print(f"\nMade in {time.monotonic() - start:.0f} s:")
    print(f"  {_shown(result):40} the converted model")
    print(f"  {_shown(PLAN):40} the plan it was made with")
    return 0


def run(*arguments: object) -> None:
    """Run one `exllamav3` command in this process, echoing it as it would be typed here."""
    words = [_shown(a) if isinstance(a, Path) else str(a) for a in arguments]
    print("\n$ exllamav3", *words, flush=True)
    status = exllamav3_command(words)
    if status:
        sys.exit(status)


def _shown(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
