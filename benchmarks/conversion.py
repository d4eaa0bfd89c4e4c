#!/usr/bin/env python3
"""Time and memory of converting a model of Qwen3.5-27B's shape, from one real block of each kind.

    python benchmarks/conversion.py             # 128 calibration rows of 1024 tokens, whole head
    python benchmarks/conversion.py --quick     # 32 rows, a slice of the head

Runs the converter's own pipeline on a delta net block, an attention block and the head with random
BF16 weights on the CPU and random rows: load, capture, quantize, advance. The model has 64 layers,
every fourth of them attention:

    seconds = 48 x delta net block + 16 x attention block + head

With fewer rows than the default, capturing and advancing are scaled up; with a slice of the head,
its load, quantizing and advancing are. Reading the source from disk and writing the result are not
part of it.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from decode import CONFIG, own_shapes
from exllamav3.conversion import ConversionOptions
from exllamav3.conversion.pipeline import CalibrationState, ModulePipeline
from exllamav3.conversion.replicas import Replicas
from exllamav3.conversion.reports import LinearReport, Silent
from exllamav3.conversion.targets import allocate_model, module_layout
from gpu_timing import environment, need_gpus
from torch import Tensor

import exllamav3_ext
from exllamav3.architecture.decoder import build_decoder
from exllamav3.architecture.table import read_spec
from exllamav3.model.config import Config
from exllamav3.modules.embedding import Embedding
from exllamav3.modules.module import DictSource, Module

LAYERS = {"delta net block": 48, "attention block": 16, "head": 1}
INDEX = {"delta net block": 1, "attention block": 2, "head": 4}
PARTS = ("load", "capture", "quantize", "advance")
SLICE = 16384
"""Vocabulary of a quick run."""


@dataclass
class Timing(Silent):
    """Seconds and peak GPU bytes by part of one module, told by the pipeline's own stages."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    linears: list[LinearReport] = field(default_factory=list)
    part: str = "load"
    since: float = 0.0

    def enter(self, part: str) -> None:
        """The part that runs until the next call."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.part] += now - self.since
        self.peak[self.part] = max(self.peak[self.part], torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        self.part, self.since = part, now

    def stage(self, key: str, name: str, total: float) -> None:
        self.enter({"capturing": "capture", "quantizing": "quantize"}.get(name, "advance"))

    def linear(self, report: LinearReport) -> None:
        self.linears.append(report)


def random_tensors(modules: Sequence[Module]) -> dict[str, Tensor]:
    """BF16 weights on the CPU for all but the embedding, which no measured module reads."""
    tensors: dict[str, Tensor] = {}
    for top in modules:
        for part in top:
            if isinstance(part, Embedding):
                continue
            for name, (shape, scale) in own_shapes(part).items():
                made = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale
                tensors[name] = made.cpu()
    torch.cuda.empty_cache()
    return tensors


def make_pipeline(bits: float, rows: int, vocab: int) -> tuple[ModulePipeline, list]:
    """The pipeline over a model of one block of each kind, and the layouts of its modules."""
    config = {
        **CONFIG,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": vocab,
    }
    spec = read_spec(Config(config))
    options = ConversionOptions(
        "-", "-", "-", bits=bits, head_bits=6, cal_rows=rows, devices=("cuda:0",)
    )
    modules = build_decoder(spec)
    source = DictSource(random_tensors(modules))
    rates = allocate_model(modules, options)
    layouts = [module_layout(m, source.names(), rates, options, None) for m in modules]
    devices = [torch.device("cuda:0")]
    dense, quantized = (Replicas(lambda: build_decoder(spec), devices) for _ in range(2))
    return ModulePipeline(dense, quantized, source, options, Silent()), layouts


def measure(pipeline: ModulePipeline, layouts: list, state: CalibrationState) -> dict[str, Timing]:
    """Every module once, in order; the rows move through them."""
    timings = {}
    names = {index: name for name, index in INDEX.items()}
    for index in range(1, len(layouts)):
        timing = Timing()
        pipeline.listener = timing
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        timing.since = time.perf_counter()
        last = index + 1 == len(layouts)
        converted = pipeline.convert(index, layouts[index], state)
        timing.enter("load")
        fidelity = pipeline.advance(index, converted, state, last)
        timing.enter("load")
        if index in names:
            timings[names[index]] = timing
            error = "" if fidelity is None else f", relative error {fidelity.relative_error:.4f}"
            print(f"\n{names[index]}{error}")
            for report in timing.linears:
                print(report.line(), flush=True)
    return timings


def extrapolate(timings: dict[str, Timing], per_row: float, head_share: float) -> None:
    """Print the table of parts, scaled to the whole model."""
    print(f"\n| seconds (peak GB) | {' | '.join(PARTS)} | sum | times |")
    print("|---|" + "---|" * (len(PARTS) + 2))
    total = 0.0
    for name, timing in timings.items():
        factors = dict.fromkeys(PARTS, 1.0) | {"capture": per_row, "advance": per_row}
        if name == "head":  # only a few reference rows are advanced through it
            factors = dict.fromkeys(PARTS, head_share) | {"capture": per_row}
        seconds = {part: timing.seconds[part] * factors[part] for part in PARTS}
        cells = [f"{seconds[part]:.2f} ({timing.peak[part] / 1e9:.1f})" for part in PARTS]
        count = LAYERS[name]
        total += count * sum(seconds.values())
        print(f"| {name} | {' | '.join(cells)} | {sum(seconds.values()):.2f} | {count} |")
    terms = " + ".join(f"{count} x {name}" for name, count in LAYERS.items())
    peak = max(max(timing.peak.values()) for timing in timings.values()) / 1e9
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"\n{terms} = {total:.0f} s = {total / 60:.1f} minutes")
    print(f"peak: {peak:.1f} GB on the GPU, {host:.1f} GB of host memory in this process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bits", type=float, default=4.0)
    arguments = parser.parse_args()
    need_gpus()
    whole = int(CONFIG["vocab_size"])
    default = ConversionOptions("-", "-", "-", bits=arguments.bits)
    rows = 32 if arguments.quick else default.cal_rows
    vocab = SLICE if arguments.quick else whole
    print(f"{environment()}, archs {exllamav3_ext.build_info().get('archs')}")
    print(f"{rows} rows of {default.cal_cols} tokens, {arguments.bits:g} bits, head 6 bits")
    torch.manual_seed(0)
    pipeline, layouts = make_pipeline(arguments.bits, rows, vocab)
    hidden = int(CONFIG["hidden_size"])
    made = torch.randn(rows, default.cal_cols, hidden, device="cuda").cpu()
    state = CalibrationState(list(made))
    del made
    timings = measure(pipeline, layouts, state)
    extrapolate(timings, default.cal_rows / rows, whole / vocab)


if __name__ == "__main__":
    main()
