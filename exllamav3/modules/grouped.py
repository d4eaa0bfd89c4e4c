"""Linears of one input in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.linear import Linear
from exllamav3.ops import exl3_linear_group
from exllamav3.ops.matrix_product import PACKED_ROWS


def can_group(linears: Sequence[Linear], x: Tensor, ctx: ForwardContext) -> bool:
    """Whether `forward_grouped` serves these linears and gains something.

    It takes EXL3 weights without bias, and pays on a GPU for few rows. Calibration reads the
    input of every linear, so it goes through `Linear.forward`.
    """
    if not x.is_cuda or x.numel() > PACKED_ROWS * x.shape[-1] or ctx.capture is not None:
        return False
    weights = [linear.weight for linear in linears]
    return all(isinstance(weight, Exl3Tensor) and weight.bias_N is None for weight in weights)


def forward_grouped(linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
    """What `Linear.forward` of each gives, bit for bit, in one launch.

    Args:
        linears: of equal input width and output dtype, for which `can_group` holds.
        x: `(..., in_features)`.
    """
    first = linears[0]
    weights = [linear.weight for linear in linears if isinstance(linear.weight, Exl3Tensor)]
    results = exl3_linear_group(
        first.pad_input(x),
        [weight.trellis_IOW for weight in weights],
        [weight.suh_K for weight in weights],
        [weight.svh_N for weight in weights],
        [weight.codebook for weight in weights],
        first.out_dtype or first.dtype,
    )
    return [y[..., : linear.out_features] for y, linear in zip(results, linears, strict=True)]


def forward_all(linears: Sequence[Linear], x: Tensor, ctx: ForwardContext) -> list[Tensor]:
    """Apply linears to one input, in one launch where that serves."""
    if len(linears) > 1 and can_group(linears, x, ctx):
        return forward_grouped(linears, x)
    return [linear.forward(x, ctx) for linear in linears]
