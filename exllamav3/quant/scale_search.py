"""Search for the global scale g with the tile quantizer itself.

The trellis covers a fixed range of values; g * R has to fill it without clipping. The
objective mean((Q(g t) / g - t)^2) over sample tiles t is smooth and flat near its minimum
(1 % from g being 8 % off), so it is followed along a coarse grid, usually for no step at all,
and refined by a parabola through the three points around it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3 import ops
from exllamav3.codec.params import TILE, TILE_WEIGHTS, Codebook
from exllamav3.codec.tiles import tiles_from_matrix
from exllamav3.quant.randomness import Stream, generator_for

PRIOR = {Codebook.MUL1: 0.74, Codebook.INST3: 0.93, Codebook.MCG: 0.93}
"""Best scale of Gaussian weights of the regularised standard deviation at 3 to 5 bits."""
STEP = 0.08
"""Distance of grid points as a share of the prior."""
FLOOR = 0.01
MAX_MOVES = 64
"""Grid steps away from the prior, far beyond what any weight needs."""
DRIFT = {1: 1.08, 2: 1.018, 3: 1.004}
"""Feedback widens the distribution that the trellis sees, at low rates noticeably."""
SAMPLE_SHARE, SAMPLE_LEAST, SAMPLE_MOST = 24, 64, 512
"""One tile in SAMPLE_SHARE is looked at, within these limits."""


def sample_positions(tile_rows: int, tile_columns: int, seed: int) -> Tensor:
    """Tiles to look at: sorted flat indices ``(samples,)`` into the tile grid, on the CPU."""
    total = tile_rows * tile_columns
    samples = min(max(total // SAMPLE_SHARE, SAMPLE_LEAST), SAMPLE_MOST, total)
    generator = generator_for(seed, Stream.SAMPLE)
    return torch.randperm(total, generator=generator)[:samples].sort().values


def gather_tiles(regular_KN: Tensor, tile_rows: Tensor, tile_columns: Tensor) -> Tensor:
    """Tiles at the given grid positions, ring order: float32 ``(samples, 256)``."""
    k, n = regular_KN.shape
    grid = regular_KN.view(k // TILE, TILE, n // TILE, TILE)
    picked_SRC = grid[tile_rows.to(regular_KN.device), :, tile_columns.to(regular_KN.device)]
    return tiles_from_matrix(picked_SRC.reshape(-1, TILE)).reshape(-1, TILE_WEIGHTS)


def search_scale(tiles_TW: Tensor, bits: int, codebook: Codebook) -> float:
    """Scale g at which the tile quantizer represents g * tiles best.

    Args:
        tiles_TW: float32 ``(samples, 256)``, ring order, of regularised weights.
        bits, codebook: of the tile quantizer.
    """
    tiles_TW = tiles_TW * DRIFT.get(bits, 1.0)
    errors: dict[int, float] = {}
    point = 0
    for _ in range(MAX_MOVES):
        around = (point - 1, point, point + 1)
        missing = [i for i in around if i not in errors]
        scales = [_scale(i, codebook) for i in missing]
        errors.update(zip(missing, _errors(tiles_TW, scales, bits, codebook), strict=True))
        best = min(around, key=errors.__getitem__)
        if best == point:
            return _scale(point + _vertex(*(errors[i] for i in around)), codebook)
        point = best
        if _scale(point, codebook) <= FLOOR:
            break
    return _scale(point, codebook)


def _vertex(below: float, here: float, above: float) -> float:
    """Minimum of the parabola through the values at -1, 0 and 1, at most half a step away."""
    bend = below - 2 * here + above
    offset = 0.5 * (below - above) / bend if bend > 0 else 0.0
    return min(max(offset, -0.5), 0.5)


def _scale(point: float, codebook: Codebook) -> float:
    """Scale of a grid point; 0 is the prior."""
    return max(PRIOR[codebook] * (1 + STEP * point), FLOOR)


def _errors(tiles_TW: Tensor, scales: list[float], bits: int, codebook: Codebook) -> list[float]:
    """Mean squared error of the tiles at each scale, all scales in one call."""
    scales_S11 = torch.tensor(scales, device=tiles_TW.device)[:, None, None]
    scaled = (tiles_TW * scales_S11).reshape(-1, TILE_WEIGHTS)
    values, _ = ops.quantize_tiles(scaled, bits, codebook)
    error = values.reshape(len(scales), *tiles_TW.shape) / scales_S11 - tiles_TW
    return error.to(torch.float64).square_().mean(dim=(1, 2)).tolist()
