"""Several EXL3 linears of one input as one launch on a GPU.

The members keep their own widths, rates, codebooks and scales. Each is computed exactly as alone,
so the results are equal bit for bit; what is saved is launches and the idle tail of small ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.linear import Linear
from exllamav3.ops import exl3_linear_group

MAX_ROWS = 64
"""Rows of the input up to which an EXL3 linear is one launch of the packed kernel. Above that each
reconstructs its weight, and there is nothing to share."""


def grouped_forward(
    linears: Sequence[Linear], x: Tensor, ctx: ForwardContext
) -> list[Tensor] | None:
    """Apply linears of equal input width to `(..., in_features)` in one launch.

    Returns:
        What `Linear.forward` of each gives, or None where one launch does not serve: on the CPU,
        with more rows than `MAX_ROWS`, while calibrating, with a bias, padding or a dense member.
    """
    if not x.is_cuda or x.numel() > MAX_ROWS * x.shape[-1] or ctx.capture is not None:
        return None
    weights = [linear.weight for linear in linears]
    for linear, weight in zip(linears, weights, strict=True):
        is_plain = (
            linear.in_padded == linear.in_features and linear.out_padded == linear.out_features
        )
        if not isinstance(weight, Exl3Tensor) or weight.bias_N is not None or not is_plain:
            return None
    members = [weight for weight in weights if isinstance(weight, Exl3Tensor)]
    return exl3_linear_group(
        x,
        [weight.trellis_IOW for weight in members],
        [weight.suh_K for weight in members],
        [weight.svh_N for weight in members],
        [weight.codebook for weight in members],
        linears[0].out_dtype or linears[0].dtype,
    )
