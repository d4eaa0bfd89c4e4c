"""Bit layout, tile order and reconstruction in plain torch: the executable specification.

Source: docs/format.md. Rates are counted in half bits (`half_bits = 2 K`), so that
1.5, 2.5 and 3.5 are integers too.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from exllamav3.ops.reference.codebook import codebook_values
from exllamav3.ops.reference.hadamard import rotate

RING = 256


@cache
def symbol_bits(half_bits: int) -> Tensor:
    """New bits that each ring position appends: int64 ``[256]``."""
    odd = torch.arange(RING) & 1
    return (half_bits + odd) // 2


@cache
def window_ends(half_bits: int) -> Tensor:
    """Ring bit at which the window of each position ends, exclusive: int64 ``[256]``."""
    return symbol_bits(half_bits).cumsum(0)


@cache
def ring_order() -> Tensor:
    """Element ``16 * row + col`` of the tile at each ring position: int64 ``[256]``."""
    t = torch.arange(RING)
    row = 8 * ((t >> 1) & 1) + 2 * ((t >> 3) & 3) + (t & 1)
    col = 8 * ((t >> 2) & 1) + (t >> 5)
    return 16 * row + col


def ring_bits(trellis: Tensor) -> Tensor:
    """Ring bits in order: int16 ``(..., 16 K)`` -> int64 ``(..., 256 K)``."""
    halves = trellis.to(torch.int64) & 0xFFFF
    # Words are MSB first but little-endian: the second uint16 of a word comes first in the ring.
    halves = halves.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    shifts = torch.arange(15, -1, -1, device=trellis.device)
    return ((halves[..., None] >> shifts) & 1).flatten(-2)


def unpack(trellis: Tensor) -> Tensor:
    """States of every ring position: ``(k/16, n/16, 16 K)`` -> ``(k/16, n/16, 256)``, int16."""
    half_bits = trellis.shape[-1] // 8
    bits = ring_bits(trellis)
    end = window_ends(half_bits).to(trellis.device)
    window = torch.arange(16, device=trellis.device)
    index = (end[:, None] - 16 + window) % bits.shape[-1]
    return _to_int16((bits[..., index] << (15 - window)).sum(-1))


def pack(states: Tensor, half_bits: int) -> Tensor:
    """Inverse of `unpack` for closed rings: keeps the newest bits of every state."""
    states = states.to(torch.int64)
    ends, widths = window_ends(half_bits).tolist(), symbol_bits(half_bits).tolist()
    bits = states.new_zeros((*states.shape[:-1], ends[-1]))
    for t, (end, width) in enumerate(zip(ends, widths, strict=True)):
        for j in range(width):
            bits[..., end - 1 - j] = (states[..., t] >> j) & 1
    weights = 1 << torch.arange(15, -1, -1, device=states.device)
    halves = (bits.unflatten(-1, (-1, 16)) * weights).sum(-1)
    return _to_int16(halves.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def decode(trellis: Tensor, codebook: int) -> Tensor:
    """Rotated-basis matrix: int16 ``(k/16, n/16, 16 K)`` -> float16 ``(k, n)``."""
    k_tiles, n_tiles = trellis.shape[:2]
    states = unpack(trellis).to(torch.int64) & 0xFFFF
    values = codebook_values(codebook).to(trellis.device)[states]
    tiles = torch.empty_like(values)
    tiles[..., ring_order().to(trellis.device)] = values
    tiles = tiles.view(k_tiles, n_tiles, 16, 16).transpose(1, 2)
    return tiles.reshape(16 * k_tiles, 16 * n_tiles)


def reconstruct(
    trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int, dtype: torch.dtype
) -> Tensor:
    """Original-basis matrix ``diag(suh) P_k W P_n diag(svh)``: ``(k, n)``, float32 inside."""
    inner = decode(trellis, codebook).float()
    rows = rotate(inner.T).T * suh.float()[:, None]
    return (rotate(rows) * svh.float()).to(dtype).contiguous()


def _to_int16(values: Tensor) -> Tensor:
    return torch.where(values < 0x8000, values, values - 0x10000).to(torch.int16)
