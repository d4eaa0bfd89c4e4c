"""`model.safetensors.index.json`: which shard holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exllamav3.errors import FormatError
from exllamav3.util.json_text import parse_json

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Index:
    """A parsed index.

    weight_map: file name (no folder) by tensor name.
    metadata: whatever the writer put there, `total_size` among it.
    """

    path: Path
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any]


def read_index(path: Path) -> Index:
    """Parse an index file.

    Raises:
        FormatError: not JSON, a missing or wrong `weight_map`, or a shard outside the folder.
    """
    try:
        obj = parse_json(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(obj, dict) or not isinstance(obj.get("weight_map"), dict):
        raise FormatError(f'{path}: expected an object with a "weight_map" object')
    for tensor, name in obj["weight_map"].items():
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or not name.endswith(".safetensors"):
            raise FormatError(
                f"{path}: weight_map[{tensor!r}] is {name!r}, expected the name of a "
                f"*.safetensors file in the same folder"
            )
    metadata = obj.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: metadata is a {type(metadata).__name__}, expected an object")
    return Index(path, obj["weight_map"], metadata)
