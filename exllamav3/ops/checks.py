"""Argument checks shared by the operator wrappers: readable errors before any kernel runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.status import require_device
from exllamav3.util.rates import RATES, rate_of

BLOCK = 128
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@runtime_checkable
class HasId(Protocol):
    """Anything with a codebook number, such as `exllamav3.codec.params.Codebook`."""

    @property
    def id(self) -> int:
        """0 = 3inst, 1 = mcg, 2 = mul1."""
        ...


CodebookLike: TypeAlias = HasId | int


def codebook_id(codebook: CodebookLike) -> int:
    """Number of a codebook given as an enum member or as that number."""
    number = codebook.id if isinstance(codebook, HasId) else codebook
    if number not in (0, 1, 2):
        raise FormatError(f"codebook {codebook!r} is unknown: use 0 (3inst), 1 (mcg) or 2 (mul1)")
    return number


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    dim: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Check type, dtype, number of dimensions and device of one argument.

    Raises:
        FormatError: names the operator, the argument, what was found and expected.
        UnsupportedError: the device cannot be served by this build.
    """
    if not isinstance(tensor, Tensor):
        raise FormatError(f"{op}: {name} is a {type(tensor).__name__}, expected a tensor")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise FormatError(f"{op}: {name} is {found}, expected {expected}")
    if dim is not None and tensor.dim() != dim:
        raise FormatError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected {dim} dimensions"
        )
    if device is None:
        require_device(tensor.device)
    elif tensor.device != device:
        raise FormatError(f"{op}: {name} is on {tensor.device}, expected {device}")


def check_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int], why: str) -> None:
    """Check a whole shape; `why` says where the expectation comes from."""
    if tuple(tensor.shape) != tuple(shape):
        raise FormatError(
            f"{op}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} ({why})"
        )


def check_blocks(op: str, name: str, size: int) -> None:
    """Check that a channel count is made of whole Hadamard blocks."""
    if size == 0 or size % BLOCK:
        raise FormatError(
            f"{op}: {name} is {size}, expected a positive multiple of {BLOCK}; "
            f"pad with zeros up to whole Hadamard blocks"
        )


def check_trellis(op: str, trellis: Tensor, codebook: int | None = None) -> tuple[int, int]:
    """Check a trellis ``(k/16, n/16, 16 K)`` and return its ``(k, n)``.

    Raises:
        FormatError: wrong dtype, dimensions or rate, or a half-integer rate with a
            codebook other than mul1.
    """
    check_tensor(op, "trellis", trellis, (torch.int16,), 3)
    bits = rate_of(trellis.shape[2])
    if bits is None:
        raise FormatError(
            f"{op}: last dimension of trellis is {trellis.shape[2]}, expected 16*K with K in "
            f"{RATES}"
        )
    if codebook is not None and codebook != 2 and isinstance(bits, float):
        raise FormatError(
            f"{op}: rate K = {bits} goes with codebook mul1 (2) only, got codebook {codebook}"
        )
    return 16 * trellis.shape[0], 16 * trellis.shape[1]
