"""Refit of the channel scales to a finished trellis: two least-squares steps, free at inference.

With W_hat = diag(su) B diag(sv) and B fixed, tr((W - W_hat)^T H (W - W_hat)) is quadratic
in sv and in su. Columns are independent: sv_n *= (q_n^T H w_n) / (q_n^T H q_n). Rows are
not: r solves ((Q Q^T) o H) r = rowsum(Q o (H W)), su *= r, where Q is W_hat before the
step and o the elementwise product. H is damped. Source: docs/format.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.quant.chunks import column_chunks
from exllamav3.quant.metrics import decoded_columns

ROUNDS = 2
RIDGE = 1e-6
"""Share of the mean diagonal added to the row system, which zero rows make singular."""


def refit_scales(
    weight_KN: Tensor, inner_KN: Tensor, su_K: Tensor, sv_N: Tensor, metric_KK: Tensor
) -> tuple[Tensor, Tensor]:
    """Scales that fit a finished trellis best; the error under the metric never grows.

    Args:
        weight_KN: source, floating ``(k, n)``.
        inner_KN: codebook values ``(k, n)``.
        su_K, sv_N: float32 scales so far; zeros stay zero.
        metric_KK: damped H in the original basis, float32 ``(k, k)``.

    Returns:
        New (su, sv).
    """
    for _ in range(ROUNDS):
        gram_KK = torch.zeros_like(metric_KK)
        moment_K = torch.zeros_like(su_K)
        column_factors = []
        for columns in column_chunks(*weight_KN.shape):
            quantized_KN = decoded_columns(inner_KN, su_K, sv_N, columns)
            pull_KN = metric_KK @ weight_KN[:, columns].to(torch.float32)
            norm_N = torch.linalg.vecdot(quantized_KN, metric_KK @ quantized_KN, dim=0)
            fit_N = torch.linalg.vecdot(quantized_KN, pull_KN, dim=0)
            # An empty column has nothing to scale; a negative factor would be a sign flip
            # of a column that the trellis did not represent at all.
            factor_N = torch.where((norm_N > 0) & (fit_N > 0), fit_N / norm_N, 1.0)
            column_factors.append(factor_N)
            quantized_KN.mul_(factor_N)
            gram_KK.addmm_(quantized_KN, quantized_KN.T)
            moment_K += torch.linalg.vecdot(quantized_KN, pull_KN, dim=1)
        sv_N = sv_N * torch.cat(column_factors)
        su_K = su_K * _row_factors(gram_KK.mul_(metric_KK), moment_K)
    return su_K, sv_N


def _row_factors(system_KK: Tensor, moment_K: Tensor) -> Tensor:
    """Solve A r = b for the row factors; all ones if the solution is no improvement.

    Factors that are not positive are replaced by 1, after which the solution need not be
    the minimum any more: hence the comparison. With d = r - 1 the objective changes by
    d^T A d + 2 d^T (A 1 - b).
    """
    diagonal_K = system_KK.diagonal().clone()
    system_KK.diagonal().add_(RIDGE * diagonal_K.mean())
    factor_KK = torch.linalg.cholesky_ex(system_KK).L
    system_KK.diagonal().copy_(diagonal_K)
    solution_K = torch.cholesky_solve(moment_K[:, None], factor_KK)[:, 0]
    solution_K = torch.where(solution_K.isfinite() & (solution_K > 0), solution_K, 1.0)
    change_K = solution_K - 1
    slope_K = system_KK.sum(dim=1) - moment_K
    gain = torch.dot(change_K, system_KK @ change_K + 2 * slope_K)
    return torch.where(gain < 0, solution_K, torch.ones_like(solution_K))
