"""From the (out, in) matrices of a checkpoint to the padded (k, n) that the quantizer takes.

Fused q, k, v are concatenated *before* padding: padding belongs to the end of the whole
matrix, once. Source: docs/format.md, "Padding"; docs/qkv_topology.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exllamav3.codec.params import pad_to_block
from exllamav3.errors import FormatError


def pad_weight(weight_OI: Tensor, bias_O: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Transpose a weight and zero-pad both sides to whole 128-blocks, at the high end.

    Args:
        weight_OI: ``(out, in)``, any floating dtype.
        bias_O: ``(out,)`` or None.

    Returns:
        ``(k, n)`` weight, contiguous, in the dtype given, and the bias of width n or None.

    Raises:
        FormatError: the weight is not a matrix, or the bias is not one value per output.
    """
    if weight_OI.dim() != 2 or not weight_OI.is_floating_point() or 0 in weight_OI.shape:
        raise FormatError(
            f"weight has shape {tuple(weight_OI.shape)} and dtype {weight_OI.dtype}, expected a "
            f"floating point (out, in) matrix"
        )
    out_features, in_features = weight_OI.shape
    n = pad_to_block(out_features)
    weight_KN = weight_OI.new_zeros(pad_to_block(in_features), n)
    weight_KN[:in_features, :out_features] = weight_OI.T
    if bias_O is None:
        return weight_KN, None
    if bias_O.shape != (out_features,):
        raise FormatError(
            f"bias has shape {tuple(bias_O.shape)}, expected ({out_features},), one value per "
            f"row of the weight"
        )
    bias_N = bias_O.new_zeros(n)
    bias_N[:out_features] = bias_O
    return weight_KN, bias_N


def concat_qkv(parts: Sequence[Tensor]) -> Tensor:
    """Stack the unpadded q, k and v weights ``(out, in)``, or their biases ``(out,)``, in order.

    The bits are copied: `split_qkv` with the same sizes gives the parts back unchanged.

    Raises:
        FormatError: not three parts, or they differ in dtype or input width.
    """
    kinds = {(part.dtype, part.dim(), *part.shape[1:]) for part in parts}
    if len(parts) != 3 or len(kinds) != 1 or parts[0].dim() not in (1, 2):
        found = ", ".join(f"{tuple(part.shape)} {part.dtype}" for part in parts)
        raise FormatError(
            f"fused q, k, v: got {len(parts)} parts ({found}), expected three (out, in) weights "
            f"or three (out,) biases of one dtype and one input width"
        )
    return torch.cat(list(parts))


def split_qkv(fused: Tensor, splits: Sequence[int]) -> tuple[Tensor, ...]:
    """Views of the parts of a `concat_qkv`; rows past the last split are padding.

    Args:
        fused: ``(rows, ...)``.
        splits: rows of q, k and v, unpadded.

    Raises:
        FormatError: the splits need more rows than there are.
    """
    if sum(splits) > fused.shape[0] or min(splits) <= 0:
        raise FormatError(
            f"fused q, k, v: splits {list(splits)} do not fit into {fused.shape[0]} rows; each "
            f"must be positive and their sum at most that"
        )
    return torch.split(fused[: sum(splits)], list(splits))
