"""The orthonormal 128-point Hadamard transform in plain torch.

Source: docs/format.md, section "Reconstruction".
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 128


@cache
def hadamard_matrix() -> Tensor:
    """Sylvester matrix in natural order over sqrt(128): float32 ``(128, 128)``, symmetric."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / BLOCK**0.5


def rotate(x: Tensor) -> Tensor:
    """Transform consecutive blocks of 128 of the last dimension of a float32 tensor."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    return (blocks @ hadamard_matrix().to(x)).flatten(-2)


def hadamard(x: Tensor, pre_scale: Tensor | None, post_scale: Tensor | None) -> Tensor:
    """``post_scale * P(pre_scale * x)``, float32 inside, in the dtype of `x`."""
    y = x.float()
    if pre_scale is not None:
        y = y * pre_scale.float()
    y = rotate(y)
    if post_scale is not None:
        y = y * post_scale.float()
    return y.to(x.dtype).contiguous()
