"""Between a matrix and its 16x16 tiles in ring order.

Ring position t = b7..b0 (bits) holds row ``8 b1 + 2 (2 b4 + b3) + b0`` and column
``8 b2 + (4 b7 + 2 b6 + b5)`` of its tile: the order in which the lanes of a
``mma.m16n8k16`` hold their B fragments. Source: docs/format.md, section "Tile order".
"""

from __future__ import annotations

from torch import Tensor

from exllamav3.codec.params import TILE, TILE_WEIGHTS
from exllamav3.errors import FormatError

ROW_BITS, COLUMN_BITS = (2, 4, 2), (2, 8)
"""A row is (b1, b4 b3, b0) and a column (b2, b7 b6 b5), most significant part first."""
RING_BITS = (8, 4, 2, 2, 2)
"""A ring position is (b7 b6 b5, b4 b3, b2, b1, b0)."""


def tile_to_ring(tile: Tensor) -> Tensor:
    """Row-major tile ``(..., 16, 16)`` -> ring order ``(..., 256)``, contiguous."""
    if tile.shape[-2:] != (TILE, TILE):
        raise FormatError(f"tile has shape {tuple(tile.shape)}, expected (..., {TILE}, {TILE})")
    bits = tile.unflatten(-1, COLUMN_BITS).unflatten(-3, ROW_BITS)
    lead = tuple(range(tile.dim() - 2))
    b1, b43, b0, b2, b765 = range(tile.dim() - 2, tile.dim() + 3)
    result: Tensor = bits.permute(*lead, b765, b43, b2, b1, b0).flatten(-5)
    return result.contiguous()


def tiles_from_matrix(w_KN: Tensor) -> Tensor:
    """Matrix ``(k, n)`` -> tiles in ring order ``(k/16, n/16, 256)``.

    Raises:
        FormatError: not a matrix, or a side is not a multiple of 16.
    """
    if w_KN.dim() != 2 or w_KN.shape[0] % TILE or w_KN.shape[1] % TILE:
        raise FormatError(
            f"matrix has shape {tuple(w_KN.shape)}, expected (k, n), multiples of {TILE}"
        )
    tiles: Tensor = w_KN.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)
    return tile_to_ring(tiles)


def matrix_from_tiles(tiles: Tensor) -> Tensor:
    """Tiles in ring order ``(k/16, n/16, 256)`` -> contiguous matrix ``(k, n)``."""
    if tiles.dim() != 3 or tiles.shape[2] != TILE_WEIGHTS:
        raise FormatError(f"tiles have shape {tuple(tiles.shape)}, expected (k/16, n/16, 256)")
    # One copy, straight from ring order to rows: this runs once per block row of the quantizer.
    k_tiles, n_tiles = tiles.shape[:2]
    bits = tiles.unflatten(-1, RING_BITS)  # k tile, n tile, b765, b43, b2, b1, b0
    result: Tensor = bits.permute(0, 5, 3, 6, 1, 4, 2).reshape(k_tiles * TILE, n_tiles * TILE)
    return result
