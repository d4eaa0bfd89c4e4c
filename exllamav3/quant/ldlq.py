"""LDLQ: quantize block rows from the last to the first and feed every error back.

    input_j = R_j + sum over i > j of L[i, j]^T E_i,    E_i = R_i - Q_i
    Q_j = tile_quantizer(input_j)

R is the regularised weight in codebook units, L the strictly lower part of the block LDL
factor of the metric. All tiles of a block row go to the tile quantizer in one call, so
there are k/16 sequential steps. Feedback is buffered: inside a span of 128 rows only the
span's own errors are applied, and once a span is complete its errors are added to all
earlier rows in one product. Columns do not interact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exllamav3 import ops
from exllamav3.codec.params import HADAMARD_BLOCK, TILE, TILE_WEIGHTS, Codebook
from exllamav3.codec.tiles import matrix_from_tiles, tiles_from_matrix

SPAN = HADAMARD_BLOCK
"""Rows whose feedback to earlier rows is applied together."""


def quantize_with_feedback(
    target_KN: Tensor,
    feedback_KK: Tensor,
    bits: int,
    codebook: Codebook,
    progress: Callable[[float], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize a regularised weight under the metric whose factor is given.

    Args:
        target_KN: float32 ``(k, n)`` in codebook units (global scale applied); unchanged.
        feedback_KK: float32 ``(k, k)``, from `block_ldl`.
        bits, codebook: of the tile quantizer.
        progress: told the finished share of the rows after every span.

    Returns:
        Float32 ``(k, n)`` codebook values and int16 ``(k/16, n/16, 256)`` trellis states.
        Besides them and the arguments, memory for one span is used.
    """
    k, n = target_KN.shape
    # Rows not reached yet hold target + feedback so far, rows done hold their result.
    work_KN = target_KN.clone()
    states = torch.empty(
        k // TILE, n // TILE, TILE_WEIGHTS, dtype=torch.int16, device=work_KN.device
    )
    error_SN = target_KN.new_empty(SPAN, n)
    for start in range(k - SPAN, -1, -SPAN):
        for low in range(SPAN - TILE, -1, -TILE):
            row, high = start + low, low + TILE
            input_RN = work_KN[row : row + TILE]
            if high < SPAN:
                local_SR = feedback_KK[start + high : start + SPAN, row : row + TILE]
                input_RN = torch.addmm(input_RN, local_SR.T, error_SN[high:])
            tiles = tiles_from_matrix(input_RN).reshape(-1, TILE_WEIGHTS)
            values, states[row // TILE] = ops.quantize_tiles(tiles, bits, codebook)
            result_RN = matrix_from_tiles(values.reshape(1, -1, TILE_WEIGHTS))
            torch.sub(target_KN[row : row + TILE], result_RN, out=error_SN[low:high])
            work_KN[row : row + TILE] = result_RN
        if start:
            earlier_SE = feedback_KK[start : start + SPAN, :start]
            work_KN[:start].addmm_(earlier_SE.T, error_SN)
        if progress is not None:
            progress(1 - start / k)
    return work_KN, states


def quantize_without_feedback(
    target_KN: Tensor,
    bits: int,
    codebook: Codebook,
    progress: Callable[[float], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Round every tile by itself: the path of weights that have no usable metric.

    Arguments and results as in `quantize_with_feedback`.
    """
    k = target_KN.shape[0]
    values_KN = torch.empty_like(target_KN)
    states = _empty_states(target_KN)
    for start in range(0, k, SPAN):
        rows = slice(start, start + SPAN)
        tiles = tiles_from_matrix(target_KN[rows])
        values, found = ops.quantize_tiles(tiles.reshape(-1, TILE_WEIGHTS), bits, codebook)
        values_KN[rows] = matrix_from_tiles(values.reshape(tiles.shape))
        states[start // TILE : (start + SPAN) // TILE] = found.reshape(tiles.shape)
        if progress is not None:
            progress((start + SPAN) / k)
    return values_KN, states


def _empty_states(target_KN: Tensor) -> Tensor:
    k, n = target_KN.shape
    shape = (k // TILE, n // TILE, TILE_WEIGHTS)
    return torch.empty(shape, dtype=torch.int16, device=target_KN.device)
