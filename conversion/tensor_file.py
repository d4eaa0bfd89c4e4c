"""Writing safetensors files one tensor at a time, and reading whole ones back.

Sizes are known before the first byte, so the header is written first and each
tensor is fetched only when its turn comes: memory holds one tensor, not a shard.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exllamav3.checkpoint.header import read_header
from exllamav3.errors import FormatError
from exllamav3.modules.module import DTYPE_NAMES

from .durable import Step, ignore_step, replacing

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor that is about to be written: what the header says, and how to get the values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> PendingTensor:
        """Wrap a tensor that is already in memory."""
        return cls(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: tensor)

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return torch.empty((), dtype=_TORCH_DTYPES[self.dtype]).element_size()

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype]


def write_tensor_file(
    path: Path,
    tensors: Sequence[PendingTensor],
    metadata: Mapping[str, str] | None = None,
    step: Step = ignore_step,
    step_name: str = "tensor",
) -> None:
    """Write one safetensors file under a temporary name and rename it into place.

    Wide dtypes come first, then names in plain order, so that every tensor is aligned
    to its own width and equal contents give equal bytes.

    Raises:
        FormatError: a tensor is not what its header entry says.
        ConversionError: the disk is full.
    """
    ordered = sorted(tensors, key=lambda t: (-t.item_bytes, t.name))
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    offset_bytes = 0
    for tensor in ordered:
        stop_bytes = offset_bytes + tensor.size_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, stop_bytes],
        }
        offset_bytes = stop_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, tensor in enumerate(ordered):
            if number == len(ordered) // 2:
                file.flush()
                step(step_name)
            file.write(_bytes_of(tensor, path))


def read_tensor_file(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """All tensors of a file by name, and its metadata.

    Raises:
        FormatError: the file is truncated or otherwise damaged.
    """
    header = read_header(path)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in header.tensors}, header.metadata
    except SafetensorError as error:
        raise FormatError(f"{path}: cannot be read ({error}); the file is damaged") from error


def _bytes_of(pending: PendingTensor, path: Path) -> Any:
    tensor = pending.fetch()
    if tensor.dtype != pending.torch_dtype or tuple(tensor.shape) != pending.shape:
        raise FormatError(
            f"{path}: tensor {pending.name} is {tensor.dtype} {list(tensor.shape)}, the header "
            f"says {pending.dtype} {list(pending.shape)}; its source changed while it was copied"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
