"""Block LDL factorisation of the metric: what error feedback multiplies errors with.

    M = Lu D Lu^T,  Lu unit block lower triangular, blocks of 16 rows (one row of tiles)

With feedback the objective tr(E^T M E) becomes sum_j tr(U_j^T D_j U_j), U_j the rounding
error that the tile quantizer makes at block row j alone. Source: docs/format.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.codec.params import TILE
from exllamav3.errors import ConversionError

RETRIES = 10
"""Times that damping is raised when the factorisation fails."""
COLUMNS_AT_ONCE = 64
"""Block columns divided together."""


def block_ldl(metric_KK: Tensor, sigma_reg: float) -> Tensor:
    """Factor a symmetric positive definite matrix.

    Args:
        metric_KK: float32 ``(k, k)``, k a multiple of 16; unchanged.
        sigma_reg: a failed attempt adds twice this share of the mean diagonal and tries again.

    Returns:
        Lu - I: float32 ``(k, k)``, strictly block lower triangular. Row i, column j < i is
        how much the error of row i moves row j.

    Raises:
        ConversionError: the matrix is not positive definite even after all retries.
    """
    step = 2 * sigma_reg * metric_KK.diagonal().mean()
    attempt_KK = metric_KK
    for attempt in range(RETRIES + 1):
        lower_KK, info = torch.linalg.cholesky_ex(attempt_KK)
        if int(info) == 0 and bool(lower_KK.diagonal().isfinite().all()):
            return _unit_lower(lower_KK)
        attempt_KK = metric_KK + torch.eye(metric_KK.shape[0], device=step.device) * (
            (attempt + 1) * step
        )
    raise ConversionError(
        f"error feedback: the activation metric of shape {tuple(metric_KK.shape)} has no Cholesky "
        f"factor even with {RETRIES} rounds of extra damping (last one "
        f"{2 * RETRIES * sigma_reg:g} of the mean diagonal); expected a positive semidefinite "
        f"second-moment matrix. Check the calibration activations of this linear"
    )


def _unit_lower(lower_KK: Tensor) -> Tensor:
    """Divide the block columns of a Cholesky factor by their diagonal blocks; zero the diagonal.

    In place, because a wide input's factor takes gigabytes.
    """
    k = lower_KK.shape[0]
    blocks = k // TILE
    by_block = lower_KK.view(blocks, TILE, blocks, TILE)
    diagonal_BRC = by_block.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    identity = torch.eye(TILE, device=lower_KK.device).expand_as(diagonal_BRC)
    inverse_BRC = torch.linalg.solve_triangular(diagonal_BRC, identity, upper=False)
    for first in range(0, blocks, COLUMNS_AT_ONCE):
        part_BRC = inverse_BRC[first : first + COLUMNS_AT_ONCE]
        columns = slice(first * TILE, (first + len(part_BRC)) * TILE)
        # One product per block column, those of the range in one batch.
        column_BKC = lower_KK[:, columns].reshape(k, -1, TILE).transpose(0, 1)
        lower_KK[:, columns] = torch.bmm(column_BKC, part_BRC).transpose(0, 1).reshape(k, -1)
    by_block.diagonal(dim1=0, dim2=2).zero_()
    return lower_KK
