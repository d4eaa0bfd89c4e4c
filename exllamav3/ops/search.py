"""The trellis search: nearest closed ring of codebook values for every tile."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import CodebookLike, check_tensor, codebook_id
from exllamav3.ops.reference import search as reference
from exllamav3.ops.register import register
from exllamav3.util.rates import INTEGER_BITS

RING = 256


def quantize_tiles(tiles: Tensor, bits: int, codebook: CodebookLike) -> tuple[Tensor, Tensor]:
    """Quantize tiles of 16 x 16 weights, each on its own.

    The result of a tile depends on that tile alone, not on its neighbours in the call,
    the number of threads or the instruction set of the CPU. A GPU chooses other rings,
    with the same error on average.

    Args:
        tiles: float32 ``(T, 256)`` in ring order (docs/format.md), already divided by
            every scale: values are compared with the codebook's as they are. A NaN
            counts as 0, and what lies beyond +-64 as +-64.
        bits: K, 1 to 8.
        codebook: number or enum member.

    Returns:
        ``(values, states)``: float32 ``(T, 256)``, exact float16 codebook values, and
        int16 ``(T, 256)``, the bit patterns of their states. Each row of states is a
        closed ring, ready for `pack`.

    Raises:
        FormatError: wrong dtype, shape, rate or codebook.
    """
    number = codebook_id(codebook)
    check_tensor("quantize_tiles", "tiles", tiles, (torch.float32,), 2)
    if tiles.shape[1] != RING:
        raise FormatError(
            f"quantize_tiles: tiles has shape {tuple(tiles.shape)}, expected (T, {RING}), "
            f"one 16x16 tile in ring order for each row"
        )
    if bits not in INTEGER_BITS:
        raise FormatError(
            f"quantize_tiles: bits is {bits!r}, expected an integer from 1 to 8 "
            f"(half-integer rates are read, never written)"
        )
    values, states = torch.ops.exllamav3.quantize_tiles(tiles, int(bits), number)
    return values, states


def _quantize_tiles_fake(tiles: Tensor, bits: int, codebook: int) -> tuple[Tensor, Tensor]:
    return tiles.new_empty(tiles.shape), tiles.new_empty(tiles.shape, dtype=torch.int16)


register("quantize_tiles", reference.quantize_tiles, _quantize_tiles_fake)
