"""The header of a safetensors file, parsed strictly.

A file is: 8 bytes little-endian length N, N bytes of JSON, then the data. The JSON maps tensor
names to `{"dtype", "shape", "data_offsets": [begin, end]}` and may hold `__metadata__`, a flat map
of strings. Everything that could make a later read return the wrong bytes is checked here, so
the data can be mapped lazily. Source: the safetensors format description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta
from exllamav3.util.json_text import parse_json

MAX_HEADER_BYTES = 100_000_000
"""Limit that the safetensors library itself sets."""

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says about itself.

    tensors: shape and dtype by name, in file order.
    ranges: first byte and the one after the last, counted from the start of the file, by name.
    metadata: the `__metadata__` map, empty where there is none.
    """

    path: Path
    tensors: Mapping[str, TensorMeta]
    metadata: Mapping[str, str]
    ranges: Mapping[str, tuple[int, int]]


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        FormatError: there is no such file, it is truncated or not safetensors, or its header
            contradicts itself.
    """
    if not path.is_file():  # opening a pipe would wait for ever
        what = "a broken link" if path.is_symlink() else "no ordinary file"
        raise FormatError(
            f"{path}: {what if path.exists() or path.is_symlink() else 'missing'}; "
            f"fetch or make it again"
        )
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size_bytes - 8, MAX_HEADER_BYTES):
            raise FormatError(
                f"{path}: {size_bytes} bytes, but its first 8 bytes announce a header of {length} "
                f"bytes; the file is truncated or not safetensors, fetch or make it again"
            )
        raw = file.read(length)
    entries = _parse_json(raw, path)
    metadata = _parse_metadata(entries.pop("__metadata__", {}), path)
    ranges: list[tuple[int, int, str]] = []
    tensors: dict[str, TensorMeta] = {}
    for name, entry in entries.items():
        meta, begin, end = _parse_entry(name, entry, path)
        tensors[name] = meta
        ranges.append((begin, end, name))
    _check_ranges(sorted(ranges), size_bytes - 8 - length, path)
    places = {name: (8 + length + begin, 8 + length + end) for begin, end, name in ranges}
    return Header(path, tensors, metadata, places)


def _parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise FormatError(f"{path}: the header has {twice!r} twice; the file is damaged")
        return dict(pairs)

    try:
        entries = parse_json(raw, unique)
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(
            f"{path}: the header is not JSON ({error}); the file is damaged or not safetensors"
        ) from error
    if not isinstance(entries, dict):
        raise FormatError(
            f"{path}: the header is a JSON {type(entries).__name__}, expected an object"
        )
    return entries


def _parse_metadata(found: Any, path: Path) -> dict[str, str]:
    if not isinstance(found, dict):
        raise FormatError(
            f"{path}: __metadata__ is a {type(found).__name__}, expected an object of strings"
        )
    for key, value in found.items():
        if not isinstance(value, str):
            raise FormatError(
                f"{path}: __metadata__[{key!r}] is a {type(value).__name__}, expected a string; "
                f"write structured values as JSON text"
            )
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(name: str, entry: Any, path: Path) -> tuple[TensorMeta, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(
            f"{path}: tensor {name}: header entry is {entry!r}, expected dtype, shape and "
            f"data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(
            f"{path}: tensor {name}: dtype {dtype!r} is unknown, expected one of "
            f"{', '.join(DTYPE_BITS)}"
        )
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise FormatError(f"{path}: tensor {name}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise FormatError(
            f"{path}: tensor {name}: data_offsets {offsets!r} is not a pair of byte counts"
        )
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise FormatError(
            f"{path}: tensor {name}: {end - begin} bytes are stored, but {dtype} {shape} takes "
            f"{prod(shape) * DTYPE_BITS[dtype] // 8}"
        )
    return TensorMeta(tuple(shape), dtype), begin, end


def _check_ranges(ranges: list[tuple[int, int, str]], data_bytes: int, path: Path) -> None:
    """Tensors must follow each other without gap or overlap and fill the file."""
    expected = 0
    for begin, end, name in ranges:
        if begin != expected:
            raise FormatError(
                f"{path}: tensor {name} begins at byte {begin} of the data, expected {expected}; "
                f"tensors overlap or leave a gap, the file is damaged"
            )
        expected = end
    if expected != data_bytes:
        raise FormatError(
            f"{path}: the header describes {expected} bytes of data, the file holds {data_bytes}; "
            f"it is truncated or damaged, fetch or make it again"
        )
