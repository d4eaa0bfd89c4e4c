"""Error of a quantized weight against its source, in the original basis.

proxy error: tr(E^T H E) / tr(W^T H W), the relative mean squared error of the linear's
output over the calibration tokens; E = W - W_hat, H undamped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.quant.chunks import column_chunks
from exllamav3.quant.rotation import rotate_columns, rotate_rows


def decoded_columns(inner_KN: Tensor, su_K: Tensor, sv_N: Tensor, columns: slice) -> Tensor:
    """diag(su) P inner P diag(sv) of a column range: float32 ``(k, width)``."""
    basis_KN = rotate_rows(rotate_columns(inner_KN[:, columns].to(torch.float32)))
    return basis_KN.mul_(su_K.to(torch.float32)[:, None]).mul_(sv_N[columns].to(torch.float32))


def weight_errors(
    weight_KN: Tensor, inner_KN: Tensor, su_K: Tensor, sv_N: Tensor, matrix_KK: Tensor | None
) -> tuple[float | None, float]:
    """Proxy error and relative RMS error.

    Args:
        weight_KN: source, floating ``(k, n)``, magnitudes near 1.
        inner_KN: codebook values ``(k, n)``.
        su_K, sv_N: its scales.
        matrix_KK: undamped H, or None: then there is no proxy error.

    Returns:
        (proxy error or None, sqrt(sum E^2 / sum W^2)); 0 for a weight that is all zero.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=weight_KN.device)
    for columns in column_chunks(*weight_KN.shape):
        source_KN = weight_KN[:, columns].to(torch.float32)
        error_KN = source_KN - decoded_columns(inner_KN, su_K, sv_N, columns)
        for i, x_KN in enumerate((error_KN, source_KN)):
            sums[i] += _dot(x_KN, x_KN)
            if matrix_KK is not None:
                sums[2 + i] += _dot(x_KN, matrix_KK @ x_KN)
    error_sq, source_sq, error_energy, source_energy = sums.tolist()
    rmse = (error_sq / source_sq) ** 0.5 if source_sq > 0 else 0.0
    if matrix_KK is None:
        return None, rmse
    return (error_energy / source_energy if source_energy > 0 else 0.0), rmse


def _dot(a_KN: Tensor, b_KN: Tensor) -> Tensor:
    """Sum of the elementwise product, float64 scalar; rows are summed in float32 first."""
    return torch.linalg.vecdot(a_KN, b_KN, dim=1).sum(dtype=torch.float64)
