"""Convert a model in several ways, measure each result, and keep the table in docs/results.md.

Shared by results_tiny.py and results_smollm2.py. Each table stands between two
comment lines in the document, so that one script leaves the other's alone.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from exllamav3.conversion import ConversionJob, ConversionOptions
from exllamav3.conversion.console import ConsoleListener
from torch import Tensor

from exllamav3 import Config, Model, Tokenizer
from exllamav3.evaluation import Evaluation, evaluate, token_rows

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "results.md"
EVAL_TEXT = ROOT / "examples" / "text" / "evaluation.txt"
HEADER = """# Results

Written by `make results-tiny` and `make results-smollm2`; definitions of the metrics are in
`numerics.md`. KL is KL(source || result) in nats per token.
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to convert the model.

    bits: mean bits per weight asked for
    plan: rows of a QKV topology plan, None for no plan
    kl_limit: the result must not be farther from its source; None where nothing is promised
    """

    name: str
    bits: float
    plan: Sequence[dict[str, object]] | None = None
    kl_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One row of the table; sizes in bytes of safetensors files, times in seconds."""

    name: str
    mean_bits: float | None
    size_bytes: int
    result: Evaluation
    seconds: float | None
    routes: str


def attention_layers(source: Path) -> list[str]:
    """Paths of the full-attention blocks of a model, in layer order."""
    model = Model.from_config(Config.from_directory(source))
    return [facts.layer for facts in model.facts().attention]


def fused_row(layer: str, bits: int) -> dict[str, object]:
    return {
        "layer": layer, "variant": "fused_uniform", "K": bits, "codebook": "mul1",
        "scale": "always",
    }  # fmt: skip


def measure(
    source: Path,
    work: Path,
    variants: Sequence[Variant],
    options: ConversionOptions,
    rows: int,
    cols: int,
    publish: Callable[[Sequence[Measured]], None],
) -> list[Measured]:
    """Convert and evaluate every variant; the first row of the table is the source.

    Args:
        work: emptied; results stay there.
        options: of every job; folders and bits are replaced.
        rows, cols: of the evaluation text.
        publish: called with all rows so far after each variant.
    """
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    ids = token_rows(Tokenizer.from_directory(source), EVAL_TEXT.read_text(), rows, cols)
    reference = Remembered(_load(source, options.devices[0]))
    measured = [Measured("source", None, _size_bytes(source), evaluate(reference, ids), None, "")]
    for number, variant in enumerate(variants):
        print(f"\n== {variant.name}", flush=True)
        out, mean_bits, seconds = _convert(source, work / str(number), variant, options)
        model = _load(out, options.devices[0])
        result = evaluate(model, ids, reference)
        taken = [route for routes in model.routes().values() for route in routes]
        routes = ", ".join(f"{taken.count(r)} {r}" for r in ("split", "fused") if r in taken)
        measured.append(
            Measured(variant.name, mean_bits, _size_bytes(out), result, seconds, routes)
        )
        print(f"KL {result.kl:.5f}  perplexity {result.perplexity:.3f}  {seconds:.0f} s")
        model.unload()
        publish(measured)
    return measured


class Remembered:
    """A model whose logits are computed once per row, while they fit in memory."""

    limit_bytes = 4 << 30

    def __init__(self, model: Model) -> None:
        self._model = model
        self._rows: dict[bytes, Tensor] = {}
        self._size_bytes = 0

    def forward(self, ids: Tensor, params: Mapping[str, Any]) -> Tensor:
        key = ids.numpy().tobytes()
        if key in self._rows:
            return self._rows[key]
        logits = self._model.forward(ids, params).cpu()
        self._size_bytes += logits.numel() * logits.element_size()
        if self._size_bytes <= self.limit_bytes:
            self._rows[key] = logits
        return logits


def _convert(
    source: Path, folder: Path, variant: Variant, options: ConversionOptions
) -> tuple[Path, float, float]:
    folder.mkdir()
    plan = None
    if variant.plan is not None:
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"schema": "exl3_qkv_topology/1", "layers": list(variant.plan)}))
    job_options = replace(
        options,
        in_dir=str(source),
        work_dir=str(folder / "work"),
        out_dir=str(folder / "out"),
        bits=variant.bits,
    )
    start = time.monotonic()
    with ConversionJob.create(
        job_options, str(plan) if plan is not None else None, ConsoleListener()
    ) as job:
        result = job.run()
    shutil.rmtree(folder / "work")
    return result.out_dir, result.mean_bits, time.monotonic() - start


def _load(folder: Path, device: str) -> Model:
    model = Model.from_config(Config.from_directory(folder))
    model.load(device=device)
    return model


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def table(measured: Sequence[Measured]) -> str:
    """The rows as Markdown."""
    lines = [
        "| variant | bits/weight | size (MB) | attention | perplexity | KL | top-1 | convert (s) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        result = row.result
        cells = [
            row.name,
            "" if row.mean_bits is None else f"{row.mean_bits:.2f}",
            f"{row.size_bytes / 1e6:.2f}",
            row.routes,
            f"{result.perplexity:.3f}",
            "" if result.kl is None else f"{result.kl:.5f}",
            "" if result.top1_agreement is None else f"{100 * result.top1_agreement:.2f} %",
            "" if row.seconds is None else f"{row.seconds:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def environment(device: str) -> str:
    """One line on where the numbers were measured."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name()
    threads = f"{torch.get_num_threads()} threads, " if device == "cpu" else ""
    return f"{name}, {threads}torch {torch.__version__}, Python {platform.python_version()}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_section(name: str, text: str) -> None:
    """Replace one section of docs/results.md, or append it."""
    document = DOCUMENT.read_text() if DOCUMENT.exists() else HEADER
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in document:
        before, _, rest = document.partition(begin)
        document = before + section + rest.partition(end)[2]
    else:
        document = document.rstrip() + "\n\n" + section + "\n"
    DOCUMENT.write_text(document)
    print(f"\nwrote {DOCUMENT.relative_to(ROOT)}, section {name}")


def missed_limits(variants: Sequence[Variant], measured: Sequence[Measured]) -> list[str]:
    """Sentences about results that are farther from the source than promised."""
    return [
        f"{variant.name}: KL {row.result.kl:.5f} exceeds {variant.kl_limit}"
        for variant, row in zip(variants, measured[1:], strict=True)
        if variant.kl_limit is not None
        and row.result.kl is not None
        and row.result.kl > variant.kl_limit
    ]
