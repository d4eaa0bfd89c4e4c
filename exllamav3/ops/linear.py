"""The packed EXL3 linear: matrix products straight from the trellis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.ops.checks import FLOATS, CodebookLike, check_shape, check_tensor, codebook_id
from exllamav3.ops.codec import check_out_dtype, check_weight
from exllamav3.ops.matrix_product import PACKED_ROWS, linear_by_matrix
from exllamav3.ops.reference import linear as reference
from exllamav3.ops.register import register
from exllamav3.ops.status import backend


def exl3_linear(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: CodebookLike,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``x W + bias`` with W = ``diag(suh) P_k W_inner P_n diag(svh)``, decoded on the fly.

    On the CPU all arithmetic is float32. CUDA kernels multiply float16 activations (23-bit
    fixed point for one or two rows of mul1) and accumulate in float32; more than
    `PACKED_ROWS` rows go through a decoded float16 matrix. docs/numerics.md.

    Args:
        x: float32, float16 or bfloat16 ``(..., k)``.
        trellis: int16 ``(k/16, n/16, 16 K)``.
        suh, svh: float16 ``(k,)`` and ``(n,)``.
        bias: ``(n,)``, or None.
        codebook: number or enum member.
        out_dtype: dtype of the result; that of `x` if None.

    Returns:
        ``(..., n)``.

    Raises:
        FormatError: wrong dtype, shape, rate or codebook.
    """
    number = codebook_id(codebook)
    k, n = check_weight("exl3_linear", trellis, suh, svh, number)
    check_linear_input("exl3_linear", x, k, trellis.device)
    if bias is not None:
        check_tensor("exl3_linear", "bias", bias, FLOATS, 1, trellis.device)
        check_shape("exl3_linear", "bias", bias, (n,), "one bias for each output channel")
    dtype = x.dtype if out_dtype is None else out_dtype
    check_out_dtype("exl3_linear", dtype)
    return run_linear(x, trellis, suh, svh, bias, number, dtype)


def run_linear(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """`exl3_linear` of arguments that have been checked, by whichever way is faster."""
    if _is_by_matrix(x):
        return linear_by_matrix(x, trellis, suh, svh, bias, codebook, out_dtype)
    result: Tensor = torch.ops.exllamav3.linear(x, trellis, suh, svh, bias, codebook, out_dtype)
    return result


def exl3_linear_group(
    x: Tensor,
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    codebooks: Sequence[CodebookLike],
    out_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Several linears of the same input, each with its own width, rate, scales and codebook.

    Args:
        x: float32, float16 or bfloat16 ``(..., k)``.
        trellis, suh, svh, codebooks: one entry for each member, as in `exl3_linear`.
        out_dtype: dtype of the results; that of `x` if None.

    Returns:
        One ``(..., n_i)`` for each member.

    Raises:
        FormatError: wrong dtype, shape, rate or codebook, or lists of unequal length.
    """
    lengths = {len(trellis), len(suh), len(svh), len(codebooks)}
    if len(lengths) != 1 or 0 in lengths:
        raise FormatError(
            f"exl3_linear_group: got {len(trellis)} trellis, {len(suh)} suh, {len(svh)} svh and "
            f"{len(codebooks)} codebooks, expected the same number of each, at least one"
        )
    numbers = [codebook_id(codebook) for codebook in codebooks]
    for i, number in enumerate(numbers):
        op = f"exl3_linear_group, member {i}"
        k, _ = check_weight(op, trellis[i], suh[i], svh[i], number)
        check_linear_input(op, x, k, trellis[i].device)
    dtype = x.dtype if out_dtype is None else out_dtype
    check_out_dtype("exl3_linear_group", dtype)
    if _is_by_matrix(x):
        return [
            linear_by_matrix(x, trellis[i], suh[i], svh[i], None, number, dtype)
            for i, number in enumerate(numbers)
        ]
    result: list[Tensor] = torch.ops.exllamav3.linear_group(
        x, list(trellis), list(suh), list(svh), numbers, dtype
    )
    return result


def _is_by_matrix(x: Tensor) -> bool:
    return (
        x.is_cuda
        and x.numel() > PACKED_ROWS * x.shape[-1]
        and backend("linear", x.device) == "native"
    )


def check_linear_input(op: str, x: Tensor, k: int, device: torch.device) -> None:
    """Check the activations of a product with a weight of k input channels.

    Raises:
        FormatError: wrong dtype, shape or device.
    """
    check_tensor(op, "x", x, FLOATS, None, device)
    if x.dim() == 0 or x.shape[-1] != k:
        raise FormatError(
            f"{op}: x has shape {tuple(x.shape)}, expected (..., {k}): the trellis has {k} input "
            f"channels; extend a narrower input with zeros"
        )


def _linear_fake(
    x: Tensor,
    trellis: Tensor,
    suh: Tensor,
    svh: Tensor,
    bias: Tensor | None,
    codebook: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], 16 * trellis.shape[1]), dtype=out_dtype)


def _linear_group_fake(
    x: Tensor,
    trellis: Sequence[Tensor],
    suh: Sequence[Tensor],
    svh: Sequence[Tensor],
    codebooks: Sequence[int],
    out_dtype: torch.dtype,
) -> list[Tensor]:
    shapes = [(*x.shape[:-1], 16 * member.shape[1]) for member in trellis]
    return [x.new_empty(shape, dtype=out_dtype) for shape in shapes]


register("linear", reference.linear, _linear_fake)
register("linear_group", reference.linear_group, _linear_group_fake)
