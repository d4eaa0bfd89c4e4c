"""The EXL3 linear for many rows on a GPU: reconstruct the matrix, then one library product.

A packed kernel decodes every weight for each group of rows; from some number of rows on it
is cheaper to decode once into memory and let cuBLAS multiply. docs/benchmarks.md has the
measurement behind `PACKED_ROWS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

PACKED_ROWS = 144
"""Up to this many rows a CUDA linear multiplies packed weights, in one launch."""
SLICE_COLUMNS = 32768
"""Columns reconstructed at a time: bounds the float16 matrix (335 MB at 5120 input channels)."""


def linear_by_matrix(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x W + bias`` through the float16 matrix W in the original basis.

    Args:
        x: ``(..., k)`` on a CUDA device; multiplied as float16.
        trellis, suh, svh, bias, codebook, out_dtype: as `exllamav3.ops.exl3_linear`, checked.

    Returns:
        ``(..., n)``, accumulated in float32 and rounded once.
    """
    n = 16 * trellis.shape[1]
    rows = x.reshape(-1, x.shape[-1]).to(torch.float16)
    # bfloat16 results come from float32 ones; a float16 product could overflow on the way.
    product_dtype = torch.float16 if out_dtype == torch.float16 else torch.float32
    parts = []
    for start in range(0, n, SLICE_COLUMNS):
        stop = min(start + SLICE_COLUMNS, n)
        matrix = torch.ops.exllamav3.reconstruct(
            trellis[:, start // 16 : stop // 16], suh, svh[start:stop], codebook, torch.float16
        )
        parts.append(torch.mm(rows, matrix, out_dtype=product_dtype))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if bias is not None:
        y += bias.to(y.dtype)
    return y.to(out_dtype).reshape(*x.shape[:-1], n)
