"""The packed EXL3 linear in plain torch.

Source: docs/format.md, section "Reconstruction".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exllamav3.ops.reference.codec import decode
from exllamav3.ops.reference.hadamard import rotate


def linear(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """``P_n((P_k(x * suh)) W) * svh + bias``: ``(..., k)`` -> ``(..., n)``, float32 inside."""
    rotated = rotate(x.float() * suh.float())
    y = rotate(rotated @ decode(trellis, codebook).float()) * svh.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype).contiguous()


def linear_group(
    x: Tensor,
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    codebooks: Sequence[int],
    out_dtype: torch.dtype,
) -> list[Tensor]:
    """Several linears of one input; each member has its own scales, rate and codebook."""
    members = zip(trellis, suh, svh, codebooks, strict=True)
    return [linear(x, t, u, v, None, codebook, out_dtype) for t, u, v, codebook in members]
