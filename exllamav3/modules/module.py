"""What every layer of a model is: a key, children, and tensors received from a source.

A module never opens a file. It asks a `TensorSource` for tensors by name; the source may be a
checkpoint folder or a dictionary that a converter has just filled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.modules.context import ForwardContext
from exllamav3.topology import TensorMeta

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names that safetensors gives to the dtypes of torch."""

WEIGHT_DTYPES = ("BF16", "F16", "F32")
"""Dtypes in which an unquantized weight may be stored."""


class TensorSource(Protocol):
    """Named tensors, read one at a time."""

    def names(self) -> Collection[str]:
        """Every tensor name there is."""
        ...

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        ...

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU in its stored dtype. FormatError when there is none."""
        ...

    def describe(self, name: str) -> TensorMeta:
        """Shape and stored dtype, without reading data. FormatError when there is none."""
        ...


class DictSource:
    """A `TensorSource` over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str = "memory") -> None:
        self._tensors = dict(tensors)
        self._where = where

    def names(self) -> Collection[str]:
        """Every tensor name there is."""
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return name in self._tensors

    def get(self, name: str) -> Tensor:
        """The tensor, moved to the CPU. FormatError when there is none."""
        if name not in self._tensors:
            raise FormatError(f"tensor {name} is missing in {self._where}")
        return self._tensors[name].cpu()

    def describe(self, name: str) -> TensorMeta:
        """Shape and dtype. FormatError when there is no such tensor."""
        if name not in self._tensors:
            raise FormatError(f"tensor {name} is missing in {self._where}")
        tensor = self._tensors[name]
        return TensorMeta(tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])


class Module:
    """A node of the model tree.

    Attributes:
        key: dotted path, also the prefix of its tensors in a checkpoint.
        modules: children in registration order; only these are loaded, quantized and saved.
        device, dtype: where and in which activation dtype it was loaded; device is None before.
        q_priority: precedence of its linears when bits are handed out (largest among ancestors).
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.modules: list[Module] = []
        self.device: torch.device | None = None
        self.dtype = torch.float32
        self.q_priority = 0

    def __iter__(self) -> Iterator[Module]:
        """This module, then all below it, depth first in registration order."""
        yield self
        for child in self.modules:
            yield from child

    def load(
        self, source: TensorSource, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        """Read this module and its children.

        Args:
            source: where tensors come from.
            device: where they go.
            dtype: of activations, float32 or float16; dense weights are held in it too.

        Raises:
            FormatError: a tensor is missing, or has the wrong shape or dtype.
            UnsupportedError: a tensor is stored in a dtype that cannot be computed with.
        """
        self.device, self.dtype = torch.device(device), dtype
        self.load_own(source)
        for child in self.modules:
            child.load(source, device, dtype)

    def unload(self) -> None:
        """Drop all tensors of this module and its children."""
        self.device = None
        self.unload_own()
        for child in self.modules:
            child.unload()

    def load_own(self, source: TensorSource) -> None:
        """Read the tensors this module holds itself; modules without any keep this empty body."""

    def unload_own(self) -> None:
        """Drop the tensors this module holds itself."""

    def own_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Names of the tensors `load_own` reads, given which names exist.

        A required tensor is listed even where it does not exist, so comparing the result with
        `names` finds everything that is missing before anything is read.
        """
        return ()

    def own_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """Memory that `load_own` takes on the device, from shapes and stored dtypes alone.

        Here: tensors that are held in the activation dtype `dtype`.
        """
        return count_weights(source, self.own_names(source.names())) * dtype.itemsize

    def total_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """`own_bytes` of this module and all below it."""
        return sum(module.own_bytes(source, dtype) for module in self)

    def get_tensors(self) -> dict[str, Tensor]:
        """The tensors this module holds itself, by name, as a checkpoint stores them."""
        return {}

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Apply the module to `(b, s, features)` activations."""
        raise UnsupportedError(f"{self.key}: {type(self).__name__} is not run, only stored")

    def missing(self, names: Collection[str]) -> list[str]:
        """Names that this module and its children need and `names` does not have."""
        return [n for module in self for n in module.own_names(names) if n not in names]


def count_weights(source: TensorSource, names: Collection[str]) -> int:
    """Numbers in all of these tensors; no data is read."""
    return sum(prod(source.describe(name).shape) for name in names)


def read_weight(
    source: TensorSource, name: str, shape: tuple[int, ...], purpose: str
) -> tuple[Tensor, torch.dtype]:
    """Read an unquantized tensor after checking what is stored.

    Returns:
        The tensor on the CPU, and the dtype it is stored in (so that it can be written back).

    Raises:
        FormatError: missing, or of another shape.
        UnsupportedError: stored in a dtype other than BF16, F16 and F32.
    """
    meta = source.describe(name)
    if tuple(meta.shape) != shape:
        raise FormatError(
            f"{name}: {purpose} has shape {list(meta.shape)}, the configuration asks for "
            f"{list(shape)}; config.json and the tensors belong to different models"
        )
    if meta.dtype not in WEIGHT_DTYPES:
        raise UnsupportedError(
            f"{name}: {purpose} is stored as {meta.dtype}, expected one of "
            f"{', '.join(WEIGHT_DTYPES)}; convert the checkpoint to BF16 first"
        )
    tensor = source.get(name)
    return tensor, tensor.dtype
