"""Between a matrix and its 16x16 tiles in ring order.

Ring position t = b7..b0 (bits) holds row ``8 b1 + 2 (2 b4 + b3) + b0`` and column
``8 b2 + (4 b7 + 2 b6 + b5)`` of its tile: the order in which the lanes of a
``mma.m16n8k16`` hold their B fragments. Source: docs/format.md, section "Tile order".
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.codec.params import TILE, TILE_WEIGHTS
from exllamav3.errors import FormatError
from exllamav3.ops.reference.codec import ring_order


def tile_to_ring(tile: Tensor) -> Tensor:
    """Row-major tile ``(..., 16, 16)`` -> ring order ``(..., 256)``."""
    if tile.shape[-2:] != (TILE, TILE):
        raise FormatError(f"tile has shape {tuple(tile.shape)}, expected (..., {TILE}, {TILE})")
    return tile.flatten(-2)[..., ring_order().to(tile.device)]


def ring_to_tile(ring: Tensor) -> Tensor:
    """Ring order ``(..., 256)`` -> row-major tile ``(..., 16, 16)``."""
    if ring.dim() == 0 or ring.shape[-1] != TILE_WEIGHTS:
        raise FormatError(f"ring has shape {tuple(ring.shape)}, expected (..., {TILE_WEIGHTS})")
    tile = torch.empty_like(ring, memory_format=torch.contiguous_format)
    tile[..., ring_order().to(ring.device)] = ring
    result: Tensor = tile.unflatten(-1, (TILE, TILE))
    return result


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
    if tiles.dim() != 3:
        raise FormatError(f"tiles have shape {tuple(tiles.shape)}, expected (k/16, n/16, 256)")
    return ring_to_tile(tiles).transpose(1, 2).flatten(2).flatten(0, 1).contiguous()
