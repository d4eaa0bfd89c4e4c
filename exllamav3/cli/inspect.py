"""`exllamav3 inspect DIR`: what a model folder holds, from file headers alone."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exllamav3.checkpoint.tensor_files import CheckpointWarning, TensorFiles
from exllamav3.checkpoint.tensor_storage import check_storage
from exllamav3.cli.inventory import Entry, take_inventory, to_obj, totals
from exllamav3.cli.output import human_bytes, print_table
from exllamav3.codec.bit_rate import BitRate
from exllamav3.errors import FormatError
from exllamav3.model.config import Config
from exllamav3.model.fields import read_json_object
from exllamav3.topology import declaration_in_config

HEADER = ("weight", "topology", "codebook", "K", "stored", "shape", "size")


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="exllamav3 inspect",
        description="List the weights of a model folder, from file headers alone. Shapes of "
        "EXL3 weights are in x out with padding, those of others as stored.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, help="model folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    arguments = parser.parse_args(argv)

    report = inspect_directory(arguments.directory)
    if arguments.json:
        print(json.dumps({**report, "weights": [to_obj(e) for e in report["weights"]]}, indent=1))
    else:
        _print(report)
    return 0


def inspect_directory(directory: Path) -> dict[str, Any]:
    """Collect what the command shows.

    Returns:
        `directory`; `architecture`; `quantization`, the section of config.json without the
        declaration, or None; `topology`, the declaration, or None; `weights`, a list of
        `inventory.Entry`; `totals`, see `inventory.totals`.

    Raises:
        FormatError: the folder is not a model, or its files are damaged.

    Warns:
        CheckpointWarning: quantization_config.json describes other tensors.
    """
    config = Config.from_directory(directory)
    files = TensorFiles(directory)
    _check_copy(directory / "quantization_config.json", files)
    path = directory / "config.json"
    declaration = declaration_in_config(path.read_bytes(), str(path))
    entries = take_inventory(files.inventory(), declaration)
    quantization = config.quantization.to_obj() if config.quantization else None
    if quantization is not None:
        quantization.pop("exl3_qkv_topology", None)
    return {
        "directory": str(directory),
        "architecture": config.architecture,
        "quantization": quantization,
        "topology": declaration.to_obj() if declaration else None,
        "weights": entries,
        "totals": totals(entries),
    }


def _check_copy(path: Path, files: TensorFiles) -> None:
    """Warn where `tensor_storage` does not say what is stored; nothing else depends on it."""
    if not path.is_file():
        return
    try:
        storage = read_json_object(path).get("tensor_storage", {})
        check_storage(storage, files.inventory(), f"{path}.tensor_storage")
    except FormatError as error:
        warnings.warn(str(error), CheckpointWarning, stacklevel=3)


def _print(report: dict[str, Any]) -> None:
    print(f"{report['directory']}: {report['architecture']}")
    print_table(HEADER, [_row(entry) for entry in report["weights"]], left=3)
    total = report["totals"]
    if total["exl3_linears"]:
        stored = 8 * total["exl3_bytes"] / total["exl3_weights"]
        print(
            f"{total['exl3_linears']} EXL3 linears: {total['exl3_weights']:,} weights, "
            f"{human_bytes(total['exl3_bytes'])}, {stored:.2f} bits per weight with scales"
        )
        print(f"bits per weight: {BitRate(**total['bits_per_weight'])}")
    print(f"{total['entries']} weights, {human_bytes(total['size_bytes'])}")


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        entry.key,
        entry.topology or "",
        entry.codebook or "",
        "" if entry.K is None else str(entry.K),
        entry.dtype,
        " x ".join(map(str, entry.shape)) or "scalar",
        human_bytes(entry.size_bytes),
    )
