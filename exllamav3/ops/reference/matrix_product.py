"""The two factors of an EXL3 product with many rows, in plain torch.

With s a power of two near the largest suh (docs/numerics.md),

    x W = rotate_input(x, suh) @ reconstruct_columns(trellis, suh, svh, codebook)

where W is `reconstruct(...)`. Both factors are about as large as x and W, so float16 holds them
as well as it holds those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.ops.reference.codec import decode
from exllamav3.ops.reference.hadamard import rotate


def power_above(suh: Tensor) -> Tensor:
    """The power of two above the largest magnitude of suh; 1 if that is 0 or not finite."""
    largest = suh.float().abs().max()
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent)
    return torch.where(torch.isfinite(largest), power, torch.ones_like(power))


def rotate_input(x: Tensor, suh: Tensor) -> Tensor:
    """``P_k (x suh / s)``: float16 ``(..., k)``."""
    return rotate(x.float() * (suh.float() / power_above(suh))).half().contiguous()


def reconstruct_columns(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: int) -> Tensor:
    """``s W_inner P_n diag(svh)``: float16 ``(k, n)``."""
    inner = decode(trellis, codebook).float()
    return (rotate(inner) * (svh.float() * power_above(suh))).half().contiguous()
