"""Operators on packed weights: pack, unpack, decode, reconstruct.

Conventions: a weight is ``(k, n)`` = (input channels, output channels). A trellis is
int16 ``(k/16, n/16, 16 K)`` for K bits per weight. docs/format.md is the authority.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import (
    FLOATS,
    CodebookLike,
    check_blocks,
    check_shape,
    check_tensor,
    check_trellis,
    codebook_id,
)
from exllamav3.ops.reference import codec as reference
from exllamav3.ops.register import register
from exllamav3.util.rates import HALF_BITS, INTEGER_BITS, RATES

RING = 256


def pack(states: Tensor, bits: float) -> Tensor:
    """Pack the states of closed rings, keeping the newest bits of each.

    Args:
        states: int16 bit patterns ``(..., 256)`` in ring order.
        bits: rate K, 1..8 or one of 1.5, 2.5, 3.5.

    Returns:
        int16 ``(..., 16 K)``. ``unpack(pack(s, K)) == s`` if and only if every ring is closed.

    Raises:
        FormatError: wrong dtype, shape or rate.
    """
    check_tensor("pack", "states", states, (torch.int16,))
    if states.dim() == 0 or states.shape[-1] != RING:
        raise FormatError(
            f"pack: states has shape {tuple(states.shape)}, expected (..., {RING}), whole tiles"
        )
    if bits not in INTEGER_BITS and bits not in HALF_BITS:
        raise FormatError(f"pack: bits is {bits!r}, expected {RATES}")
    result: Tensor = torch.ops.exllamav3.pack(states, float(bits))
    return result


def unpack(trellis: Tensor) -> Tensor:
    """States of every ring position: ``(k/16, n/16, 16 K)`` -> ``(k/16, n/16, 256)``, int16.

    Raises:
        FormatError: wrong dtype, number of dimensions or rate.
    """
    check_trellis("unpack", trellis)
    result: Tensor = torch.ops.exllamav3.unpack(trellis)
    return result


def decode(trellis: Tensor, codebook: CodebookLike) -> Tensor:
    """Matrix in the rotated basis, exact: ``(k/16, n/16, 16 K)`` -> float16 ``(k, n)``.

    Raises:
        FormatError: wrong dtype, shape, rate or codebook.
    """
    number = codebook_id(codebook)
    check_trellis("decode", trellis, number)
    result: Tensor = torch.ops.exllamav3.decode(trellis, number)
    return result


def reconstruct(
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    codebook: CodebookLike,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Matrix in the original basis, ``diag(suh) P_k W P_n diag(svh)``.

    Args:
        trellis: int16 ``(k/16, n/16, 16 K)``.
        suh, svh: float16 ``(k,)`` and ``(n,)``.
        codebook: number or enum member.
        dtype: float32, float16 or bfloat16; the arithmetic is float32 either way.

    Returns:
        ``(k, n)``.

    Raises:
        FormatError: wrong dtype, shape, rate or codebook.
    """
    number = codebook_id(codebook)
    check_weight("reconstruct", trellis, suh, svh, number)
    check_out_dtype("reconstruct", dtype)
    result: Tensor = torch.ops.exllamav3.reconstruct(trellis, suh, svh, number, dtype)
    return result


def check_weight(
    op: str, trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int
) -> tuple[int, int]:
    """Check the three tensors of a weight against each other; returns ``(k, n)``."""
    k, n = check_trellis(op, trellis, codebook)
    check_blocks(op, "k", k)
    check_blocks(op, "n", n)
    check_tensor(op, "suh", suh, (torch.float16,), 1, trellis.device)
    check_tensor(op, "svh", svh, (torch.float16,), 1, trellis.device)
    check_shape(op, "suh", suh, (k,), "one scale for each input channel")
    check_shape(op, "svh", svh, (n,), "one scale for each output channel")
    return k, n


def check_out_dtype(op: str, dtype: torch.dtype) -> None:
    """Check the dtype that a result is asked in."""
    if dtype not in FLOATS:
        raise FormatError(f"{op}: output dtype is {dtype}, expected float32, float16 or bfloat16")


def _pack(states: Tensor, bits: float) -> Tensor:
    return reference.pack(states, round(2 * bits))


def _pack_fake(states: Tensor, bits: float) -> Tensor:
    return states.new_empty((*states.shape[:-1], round(16 * bits)))


def _unpack_fake(trellis: Tensor) -> Tensor:
    return trellis.new_empty((trellis.shape[0], trellis.shape[1], RING))


def _decode_fake(trellis: Tensor, codebook: int) -> Tensor:
    shape = (16 * trellis.shape[0], 16 * trellis.shape[1])
    return trellis.new_empty(shape, dtype=torch.float16)


def _reconstruct_fake(
    trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int, dtype: torch.dtype
) -> Tensor:
    return trellis.new_empty((16 * trellis.shape[0], 16 * trellis.shape[1]), dtype=dtype)


register("pack", _pack, _pack_fake)
register("unpack", reference.unpack, _unpack_fake)
register("decode", reference.decode, _decode_fake)
register("reconstruct", reference.reconstruct, _reconstruct_fake)
