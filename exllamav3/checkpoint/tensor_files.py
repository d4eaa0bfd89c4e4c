"""The tensors of a checkpoint folder, read one at a time from memory-mapped files.

Where there is an index it is the authority: exactly the files and tensors it lists exist. Without
one, every safetensors file of the folder counts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from exllamav3.checkpoint.header import Header, read_header
from exllamav3.checkpoint.index import INDEX_NAME, Index, read_index
from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta

_SHARD_NAME = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class CheckpointWarning(UserWarning):
    """Something in a checkpoint folder is ignored; the message names it."""


class TensorFiles:
    """A `TensorSource` over the safetensors files of one folder.

    Args:
        directory: the folder.

    Raises:
        FormatError: no tensors, a listed shard is missing, a tensor is in two files, a listed
            tensor is in another file than the index says, or a header is damaged.

    Warns:
        CheckpointWarning: a file or a tensor that the index does not list; it is ignored.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / INDEX_NAME
        self.index: Index | None = read_index(path) if path.is_file() else None
        self.headers: dict[str, Header] = {
            name: read_header(self.directory / name) for name in self._file_names()
        }
        self._file_of = self._locate()
        self._open: dict[str, Any] = {}

    def _file_names(self) -> list[str]:
        present = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if self.index is None:
            if not present:
                raise FormatError(
                    f"{self.directory}: no *.safetensors file; this is not a model folder, or its "
                    f"weights are in a format that is not read (.bin, .pt, .gguf)"
                )
            self._check_series(present)
            return present
        listed = sorted(set(self.index.weight_map.values()))
        for name in listed:
            if name not in present:
                raise FormatError(
                    f"{self.directory / name}: missing, but {INDEX_NAME} lists tensors in it; "
                    f"fetch the file again"
                )
        for name in present:
            if name not in listed:
                warnings.warn(
                    f"{self.directory / name}: not listed in {INDEX_NAME}, ignored",
                    CheckpointWarning,
                    stacklevel=3,
                )
        return listed

    def _check_series(self, present: list[str]) -> None:
        """Without an index, a shard missing from `name-00001-of-00003` can still be told."""
        for name in present:
            match = _SHARD_NAME.fullmatch(name)
            if match is None:
                continue
            stem, number, count = match.groups()
            for other in range(1, int(count) + 1):
                shard = f"{stem}-{other:0{len(number)}d}-of-{count}.safetensors"
                if shard not in present:
                    raise FormatError(
                        f"{self.directory / shard}: missing, but {name} is one of {count}; fetch "
                        f"the file again"
                    )

    def _locate(self) -> dict[str, str]:
        """File name by tensor name, each tensor in exactly one file."""
        found: dict[str, str] = {}
        for file, header in self.headers.items():
            for name in header.tensors:
                if name in found:
                    raise FormatError(
                        f"tensor {name} is in two files, {found[name]} and {file}, of "
                        f"{self.directory}; remove the one that does not belong there"
                    )
                found[name] = file
        if self.index is None:
            return found
        for name, file in self.index.weight_map.items():
            if found.get(name) != file:
                raise FormatError(
                    f"tensor {name}: {self.index.path} says it is in {file}, it is "
                    f"{'in ' + found[name] if name in found else 'in none of the listed files'}; "
                    f"index and shards belong to different checkpoints"
                )
        extra = sorted(found.keys() - self.index.weight_map.keys())
        if extra:
            warnings.warn(
                f"{self.directory}: {len(extra)} tensors are not listed in {INDEX_NAME}, ignored: "
                f"{', '.join(extra[:4])}{' ...' if len(extra) > 4 else ''}",
                CheckpointWarning,
                stacklevel=4,
            )
        return {name: found[name] for name in self.index.weight_map}

    def names(self) -> Collection[str]:
        """Every tensor name there is."""
        return self._file_of.keys()

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._file_of

    def file_of(self, name: str) -> str:
        """Name of the file that holds the tensor. FormatError when there is none."""
        if name not in self._file_of:
            raise FormatError(f"tensor {name} is missing in {self.directory}")
        return self._file_of[name]

    def describe(self, name: str) -> TensorMeta:
        """Shape and stored dtype, from the header. FormatError when there is no such tensor."""
        return self.headers[self.file_of(name)].tensors[name]

    def inventory(self) -> Mapping[str, TensorMeta]:
        """Shape and stored dtype of every tensor."""
        return {name: self.describe(name) for name in self._file_of}

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype. FormatError when there is none."""
        file = self.file_of(name)
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.directory / file, framework="pt")
            tensor: Tensor = self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise FormatError(
                f"{self.directory / file}: tensor {name} cannot be read ({error}); the file has "
                f"changed since its header was read, or its path or dtype is not supported"
            ) from error
        return tensor

    def close(self) -> None:
        """Give the mapped files back; tensors already read stay valid."""
        self._open.clear()
