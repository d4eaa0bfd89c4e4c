"""The EXL3 linear for many rows on a GPU: decode to a matrix, then one library product.

A packed kernel decodes every weight for each group of rows; from some number of rows on it
is cheaper to decode once into memory and let cuBLAS multiply. docs/benchmarks.md has the
measurement behind `PACKED_ROWS`.

The matrix is not W itself. W needs two Hadamard transforms, and both over all of its elements;
the one over input channels is moved to the activations, of which there are fewer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.ops.reference import matrix_product as reference
from exllamav3.ops.register import register

PACKED_ROWS = 96
"""Up to this many rows a CUDA linear multiplies packed weights, in one launch."""
SLICE_COLUMNS = 32768
"""Columns decoded at a time: bounds the float16 matrix (335 MB at 5120 input channels)."""


def linear_by_matrix(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """``x W + bias`` as `rotate_input` times `reconstruct_columns`, both in float16.

    Args:
        x: ``(..., k)`` on a CUDA device.
        trellis, suh, svh, bias, codebook, out_dtype: as `exllamav3.ops.exl3_linear`, checked.

    Returns:
        ``(..., n)``, accumulated in float32 and rounded once.
    """
    n = 16 * trellis.shape[1]
    rows = torch.ops.exllamav3.rotate_input(x.reshape(-1, x.shape[-1]), suh)
    # bfloat16 results come from float32 ones; a float16 product could overflow on the way.
    product_dtype = torch.float16 if out_dtype == torch.float16 else torch.float32
    parts = []
    for start in range(0, n, SLICE_COLUMNS):
        stop = min(start + SLICE_COLUMNS, n)
        matrix = torch.ops.exllamav3.reconstruct_columns(
            trellis[:, start // 16 : stop // 16], suh, svh[start:stop], codebook
        )
        parts.append(torch.mm(rows, matrix, out_dtype=product_dtype))
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if bias is not None:
        y += bias.to(y.dtype)
    return y.to(out_dtype).reshape(*x.shape[:-1], n)


def _rotate_input_fake(x: Tensor, suh: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float16)


def _reconstruct_columns_fake(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int) -> Tensor:
    shape = (16 * trellis.shape[0], 16 * trellis.shape[1])
    return trellis.new_empty(shape, dtype=torch.float16)


register("rotate_input", reference.rotate_input, _rotate_input_fake)
register("reconstruct_columns", reference.reconstruct_columns, _reconstruct_columns_fake)
