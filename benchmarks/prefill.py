#!/usr/bin/env python3
"""Prefill on a GPU: one prompt through the 4-layer model of `decode.py`, by QKV topology.

    python benchmarks/prefill.py                 # table on stdout
    python benchmarks/prefill.py --profile       # also: which kernels a prompt of each length runs

Tokens a second for the 4 layers and one row of logits, medians; the cache is written. Every launch
comes from Python, as in `Generator`.
"""

from __future__ import annotations

import argparse

import torch
from decode import VARIANTS, make_model
from gpu_timing import environment, events, kernel_rows, need_gpus

from exllamav3 import Cache, Model

SHOWN = ("split, grouped", "fused K=4")
MAX_TOKENS = 8192


@torch.inference_mode()
def prompt_us(model: Model, tokens: int, count: int) -> float:
    """Median microseconds of one prompt."""
    cache = Cache(model, MAX_TOKENS, 1)
    ids = torch.randint(0, 1000, (1, tokens), device="cuda")

    def run() -> None:
        sequence = cache.new_sequence(tokens)
        model.forward(ids, {"cache": cache, "sequences": [sequence], "last_tokens_only": 1})
        cache.release(sequence)

    return events(run, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--count", type=int, default=9, help="timed prompts; default: 9")
    parser.add_argument("--tokens", type=int, nargs="*", default=[128, 512, 2048, 8192])
    args = parser.parse_args()
    need_gpus()
    print(environment())
    print("\n| q/k/v | tokens | ms | tokens/s |\n|---|---|---|---|")
    for name in SHOWN:
        model = make_model(*VARIANTS[name])
        for tokens in args.tokens:
            us = prompt_us(model, tokens, args.count)
            print(f"| {name} | {tokens} | {us / 1e3:.2f} | {1e6 * tokens / us:.0f} |", flush=True)
        if args.profile and name == SHOWN[-1]:
            for tokens in args.tokens:
                kernel_rows(
                    lambda t=tokens, m=model: prompt_us(m, t, 1), f"{tokens} tokens, 4 runs"
                )
        del model


if __name__ == "__main__":
    main()
