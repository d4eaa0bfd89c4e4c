"""`exllamav3 eval DIR`: perplexity on a text, and the distance from a reference model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from exllamav3.cli.arguments import add_runtime_options, build_model, load_model, positive_int
from exllamav3.cli.output import progress_bar
from exllamav3.errors import FormatError
from exllamav3.evaluation import Evaluation, evaluate, token_rows
from exllamav3.evaluation.bundled import bundled_text
from exllamav3.model.model import Model
from exllamav3.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="exllamav3 eval",
        description="Measure a model on text. With a reference (usually the unquantized source): "
        "KL(reference || model) in nats per token and top-1 agreement as well.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", help="model folder")
    parser.add_argument("--reference", metavar="DIR", help="model folder to compare with")
    parser.add_argument("--rows", type=positive_int, default=32, help="default: 32")
    parser.add_argument("--cols", type=positive_int, default=512, help="tokens a row; default: 512")
    parser.add_argument("--text", type=Path, help="UTF-8 text file; default: the bundled text")
    parser.add_argument("--add-bos", action="store_true", help="begin every row with BOS")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    add_runtime_options(parser)
    arguments = parser.parse_args(argv)

    model = build_model(arguments.directory)
    reference = build_model(arguments.reference) if arguments.reference else None
    if reference is not None:
        _check_vocabularies(model, reference)
    ids_RT = token_rows(
        Tokenizer.from_config(model.config),
        _read_text(arguments.text),
        arguments.rows,
        arguments.cols,
        arguments.add_bos,
    )
    load_model(model, arguments)
    if reference is not None:
        load_model(reference, arguments)
    with progress_bar("evaluating", len(ids_RT)) as update:
        result = evaluate(model, ids_RT, reference, update)
    if arguments.json:
        print(json.dumps(to_obj(result, arguments.directory, arguments.reference), indent=1))
    else:
        print(describe(result))
    return 0


def _check_vocabularies(model: Model, reference: Model) -> None:
    """Refuse a reference that predicts other tokens, before any weight is read."""
    sizes = [one.config.vocab_size for one in (model, reference)]
    if sizes[0] != sizes[1]:
        raise FormatError(
            f"--reference {reference.config.directory}: its vocabulary has {sizes[1]} entries, "
            f"that of {model.config.directory} {sizes[0]}; only models with the same vocabulary "
            f"can be compared"
        )


def to_obj(result: Evaluation, directory: str, reference: str | None) -> dict[str, object]:
    """The JSON form: the fields of `Evaluation`, and what was measured."""
    return {"directory": directory, "reference": reference, **asdict(result)}


def describe(result: Evaluation) -> str:
    """Lines for a reader."""
    lines = [
        f"{result.rows} rows of {result.cols} tokens",
        f"perplexity            {result.perplexity:.4f}",
    ]
    if result.kl is not None and result.top1_agreement is not None:
        lines += [
            f"reference perplexity  {result.reference_perplexity:.4f}",
            f"KL divergence         {result.kl:.6f} nats per token",
            f"top-1 agreement       {100 * result.top1_agreement:.2f} %",
        ]
    return "\n".join(lines)


def _read_text(path: Path | None) -> str:
    path = path or bundled_text()
    if not path.is_file():
        raise FormatError(f"{path}: no such text file; give one with --text")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 ({error}); give a plain text file") from error
