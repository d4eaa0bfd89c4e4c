"""Regularisation: signs, channel scales and rotations that make a weight look Gaussian.

    R = P_k diag(1/su) W diag(1/sv) P_n        (what the trellis codes)
    W = diag(su) P_k R P_n diag(sv)            (exact inverse)

su and sv carry the random signs. Their magnitudes share the error out between channels.
Feedback with the metric H leaves an error in row r that grows with su_r^2, while the range
the trellis has to cover grows with the mean over a rotated block of (i_r / su_r)^2, where
i_r is the RMS of row r. Minimising the product gives su = i with perfect feedback and
su = sqrt(i / h), h_r = sqrt(H_rr), with none; real activations are in between, and

    su = i^0.8 h^-0.2,    sv = o^0.5           (o_j the RMS of column j: no feedback there)

comes within 2 % of the best scales that a numerical optimiser finds, see
docs/adr/0010-exact-metric-and-balanced-scales.md. No su is much smaller than the others of
its block. Both are then normalised so that each 128-block has the same energy, because one
global scale has to suit all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.codec.params import HADAMARD_BLOCK
from exllamav3.quant.chunks import column_chunks
from exllamav3.quant.hessian import Hessian
from exllamav3.quant.randomness import Stream, random_signs
from exllamav3.quant.rotation import rotate_columns, rotate_rows

REGULAR_STD = 1.24371088
"""Standard deviation of R: that of the 3inst codebook, so that its scale is near 1."""
ROW_EXPONENT = 0.8
"""Exponent of the row RMS in su; the activation RMS gets this minus 1."""
COLUMN_EXPONENT = 0.5
"""Exponent of the column RMS in sv."""
ROW_FLOOR = 0.25
"""Least scale of a row, as a share of the RMS of the scales in its block; see `_with_floor`."""
ROUNDS = 2
"""Each side's RMS is taken with the other's scales applied; two rounds settle both."""
ZERO_ROW_SHARE = 0.1
"""Scale that zero rows get while coding, as a share of the other rows' in their block."""


@dataclass(frozen=True, slots=True)
class Regularization:
    """The scales of one weight; see the module text.

    su_K, sv_N: float32 ``(k,)`` and ``(n,)``, signed, nowhere zero
    zero_rows_K, zero_columns_N: bool; channels without any weight, stored with scale 0
    """

    su_K: Tensor
    sv_N: Tensor
    zero_rows_K: Tensor
    zero_columns_N: Tensor

    def forward(self, weight_KN: Tensor, columns: slice) -> Tensor:
        """R of the given columns of the weight: float32 ``(k, width)``."""
        scaled_KN = weight_KN[:, columns].to(torch.float32) / self.sv_N[columns]
        scaled_KN.div_(self.su_K[:, None])
        return rotate_rows(rotate_columns(scaled_KN))

    def metric(self, hessian: Hessian) -> Tensor:
        """P diag(su) H diag(su) P with the damping added to H: the exact metric of R.

        Rows that are stored with scale 0 cannot be wrong, so only damping remains of them.
        """
        metric_KK = hessian.matrix.clone()
        live_K = (~self.zero_rows_K).to(torch.float32)
        metric_KK.mul_(live_K).mul_(live_K[:, None])
        metric_KK.diagonal().add_(hessian.damping())
        metric_KK.mul_(self.su_K).mul_(self.su_K[:, None])
        metric_KK = rotate_rows(rotate_columns(metric_KK))
        return (metric_KK + metric_KK.T) / 2


def regularize(
    weight_KN: Tensor, hessian: Hessian | None, signs_K: Tensor, out_scales: bool, seed: int
) -> Regularization:
    """Choose the scales of a weight that is not all zero.

    Args:
        weight_KN: finite ``(k, n)``, both multiples of 128, magnitudes near 1.
        hessian: of its input, or None for uncalibrated weights.
        signs_K: float32 +-1, input signs.
        out_scales: scale output channels too, else sv has magnitude 1.
        seed: of the output signs.
    """
    device = weight_KN.device
    signs_N = random_signs(weight_KN.shape[1], seed, Stream.OUTPUT_SIGNS).to(device)
    importance_K = torch.ones(weight_KN.shape[0], device=device)
    if hessian is not None:
        importance_K = (hessian.matrix.diagonal() + hessian.damping()).sqrt()
    su_K = torch.ones_like(importance_K)
    sv_N = torch.ones_like(signs_N)
    column_rms_N = _column_rms(weight_KN, su_K)
    zero_columns_N = column_rms_N == 0
    for _ in range(ROUNDS):
        if out_scales:
            sv_N = _balance(column_rms_N.pow(COLUMN_EXPONENT), column_rms_N, 1.0)
            # All magnitude sits in su, so that svh is near 1 whatever the weight's scale.
            sv_N = sv_N / sv_N.mean()
        row_rms_K = _row_rms(weight_KN, sv_N)
        scale_K = row_rms_K.pow(ROW_EXPONENT) * importance_K.pow(ROW_EXPONENT - 1)
        su_K = _balance(_with_floor(scale_K, row_rms_K > 0), row_rms_K, REGULAR_STD)
        if not out_scales:
            break
        column_rms_N = _column_rms(weight_KN, su_K)
    return Regularization(su_K * signs_K.to(device), sv_N * signs_N, row_rms_K == 0, zero_columns_N)


def _column_rms(weight_KN: Tensor, su_K: Tensor) -> Tensor:
    """RMS of the columns of diag(1/su) W; rotating the rows does not change it."""
    parts = []
    for columns in column_chunks(*weight_KN.shape):
        scaled_KN = weight_KN[:, columns].to(torch.float32) / su_K[:, None]
        parts.append(scaled_KN.square_().mean(dim=0))
    return torch.cat(parts).sqrt_()


def _row_rms(weight_KN: Tensor, sv_N: Tensor) -> Tensor:
    """RMS of the rows of W diag(1/sv); rotating the columns does not change it."""
    total_K = torch.zeros(weight_KN.shape[0], device=weight_KN.device)
    for columns in column_chunks(*weight_KN.shape):
        scaled_KN = weight_KN[:, columns].to(torch.float32) / sv_N[columns]
        total_K += scaled_KN.square_().sum(dim=1)
    return (total_K / weight_KN.shape[1]).sqrt_()


def _with_floor(scale_K: Tensor, live_K: Tensor) -> Tensor:
    """Raise the scales of rows that are much smaller than the others of their block.

    Feedback asks every row to make up for errors of the rows that correlate with it, in
    proportion to *their* scales. A row whose own scale is far below theirs cannot hold such
    a correction: it leaves the range of the trellis, with the 127 rows it is rotated with.
    """
    live = live_K.reshape(-1, HADAMARD_BLOCK)
    scale = scale_K.reshape(-1, HADAMARD_BLOCK)
    energy = torch.where(live, scale, 0.0).square().sum(dim=1, keepdim=True)
    block_rms = (energy / live.sum(dim=1, keepdim=True).clamp(min=1)).sqrt()
    return scale.maximum(ROW_FLOOR * block_rms).reshape(-1)


def _balance(scale_C: Tensor, rms_C: Tensor, target: float) -> Tensor:
    """Scale each 128-block of scales so that the block's mean of (rms / scale)^2 is target^2.

    Channels with rms 0 take part as zeros, which is what they are after the division, and
    get a small scale of their own: it decides how much of the metric they keep.
    """
    live = (rms_C > 0).reshape(-1, HADAMARD_BLOCK)
    scale = scale_C.reshape(-1, HADAMARD_BLOCK)
    energy = torch.where(live, rms_C.reshape(-1, HADAMARD_BLOCK) / scale, 0.0).square()
    factor = energy.mean(dim=1, keepdim=True).sqrt() / target
    scale = torch.where(live, scale * factor, 0.0)
    block_mean = scale.sum(dim=1, keepdim=True) / live.sum(dim=1, keepdim=True).clamp(min=1)
    overall = scale.sum() / live.sum().clamp(min=1)
    substitute = torch.where(block_mean > 0, block_mean, overall) * ZERO_ROW_SHARE
    return torch.where(live, scale, substitute).reshape(-1)
