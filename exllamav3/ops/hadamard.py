"""The 128-point Hadamard transform as an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import FLOATS, check_blocks, check_shape, check_tensor
from exllamav3.ops.reference import hadamard as reference
from exllamav3.ops.register import register


def hadamard(
    x: Tensor, pre_scale: Tensor | None = None, post_scale: Tensor | None = None
) -> Tensor:
    """``post_scale * P(pre_scale * x)``; P rotates consecutive blocks of 128 channels.

    P is orthonormal and symmetric, so it is its own inverse.

    Args:
        x: float32, float16 or bfloat16 ``(..., k)``, k a multiple of 128.
        pre_scale, post_scale: ``(k,)``, any of those dtypes.

    Returns:
        ``(..., k)`` in the dtype of `x`, computed in float32.

    Raises:
        FormatError: wrong dtype or shape.
    """
    check_tensor("hadamard", "x", x, FLOATS)
    if x.dim() == 0:
        raise FormatError("hadamard: x is a scalar, expected (..., k)")
    k = x.shape[-1]
    check_blocks("hadamard", "last dimension of x", k)
    for name, scale in (("pre_scale", pre_scale), ("post_scale", post_scale)):
        if scale is not None:
            check_tensor("hadamard", name, scale, FLOATS, 1, x.device)
            check_shape("hadamard", name, scale, (k,), "one scale for each channel of x")
    result: Tensor = torch.ops.exllamav3.hadamard(x, pre_scale, post_scale)
    return result


def _hadamard_fake(x: Tensor, pre_scale: Tensor | None, post_scale: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


register("hadamard", reference.hadamard, _hadamard_fake)
