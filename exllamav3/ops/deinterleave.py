"""Separating the fused query/gate projection of gated attention."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import check_tensor
from exllamav3.ops.reference import deinterleave as reference
from exllamav3.ops.register import register

deinterleave_qg_reference = reference.deinterleave_qg
"""The same for any dtype and layout, in plain torch."""


def deinterleave_qg(qg: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Split ``[query | gate]`` of every head. The fast path: float16 and contiguous only.

    Args:
        qg: float16, contiguous ``(b, s, heads * 2 * head_dim)``.
        head_dim: lanes of one query head.

    Returns:
        q ``(b, s, heads, head_dim)`` and gate ``(b, s, heads * head_dim)``, contiguous.

    Raises:
        FormatError: any other dtype, layout or shape; `deinterleave_qg_reference` serves those.
    """
    check_tensor("deinterleave_qg", "qg", qg, (torch.float16,), 3)
    if head_dim <= 0 or qg.shape[-1] % (2 * head_dim):
        raise FormatError(
            f"deinterleave_qg: last dimension of qg is {qg.shape[-1]}, expected a multiple of "
            f"2 * head_dim = {2 * head_dim}"
        )
    if not qg.is_contiguous():
        raise FormatError(
            f"deinterleave_qg: qg has strides {qg.stride()}, expected a contiguous tensor; make it "
            f"contiguous where it is produced"
        )
    result: tuple[Tensor, Tensor] = torch.ops.exllamav3.deinterleave_qg(qg, head_dim)
    return result


def _deinterleave_qg_fake(qg: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    b, s, width = qg.shape
    q = qg.new_empty((b, s, width // (2 * head_dim), head_dim))
    return q, qg.new_empty((b, s, width // 2))


register("deinterleave_qg", reference.deinterleave_qg, _deinterleave_qg_fake)
