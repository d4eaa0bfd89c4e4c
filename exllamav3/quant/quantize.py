"""Quantize one linear: regularise, search the scale, code with feedback, refit, measure.

Peak memory for a weight of k x n, besides the weight itself and H (4 k^2 bytes), with c the
columns worked on at once (k c <= CHUNK_WEIGHTS):
    2 k n          codebook values, float16
    K/8 k n        packed trellis
    12 k c         coding: target, running values, states   (18 k c while refitting)
    8 k^2          metric and its factor                    (12 k^2 while factoring or refitting)
A GPU also needs cost vectors of the tiles searched at once: n/16, or 1,536 in the scale search, of
1.05 MB each at K = 4 (2.1 at 2 and 3, 0.5 at 6), at most 2.5 GB.
A 151936-column lm_head on 5120 inputs needs about 5 GB at 6 bits, a 5120 x 14336 weight 2 GB.

The result is a function of (weight, H, settings) on one machine. Tile quantizer results do
not depend on the number of threads; those of the float32 products of the BLAS behind torch
may, so a caller that promises identical bytes keeps `torch.get_num_threads()` fixed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3 import ops
from exllamav3.codec.params import HADAMARD_BLOCK, TILE
from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.errors import FormatError
from exllamav3.quant.chunks import column_chunks
from exllamav3.quant.hessian import Hessian
from exllamav3.quant.ldl import block_ldl
from exllamav3.quant.ldlq import quantize_with_feedback, quantize_without_feedback
from exllamav3.quant.magnitude import largest_magnitude, normalize, to_stored_scales
from exllamav3.quant.metrics import weight_errors
from exllamav3.quant.precision import exact_float32_matmul
from exllamav3.quant.randomness import Stream, random_signs
from exllamav3.quant.refit import refit_scales
from exllamav3.quant.regularize import Regularization, regularize
from exllamav3.quant.scale_search import gather_tiles, sample_positions, search_scale
from exllamav3.quant.settings import QuantReport, QuantSettings

Progress = Callable[[float], None]
"""Told the finished share, from 0 to 1, of the coding of one linear."""


def quantize_linear(
    weight_KN: Tensor,
    hessian: Hessian | None,
    settings: QuantSettings,
    bias_N: Tensor | None = None,
    progress: Progress | None = None,
) -> tuple[Exl3Tensor, QuantReport]:
    """Quantize one weight, with error feedback if there is a usable Hessian.

    Args:
        weight_KN: floating ``(k, n)`` on the device to work on, zero-padded to multiples of
            128 (`pad_weight`); unchanged.
        hessian: of the linear's input, on the same device; None or one with its fallback
            flag set means quantization without feedback.
        settings: rate, codebook, scale policy, seed.
        bias_N: ``(n,)`` or None; stored in float16, not quantized.
        progress: called between spans of rows; must not raise.

    Returns:
        The tensor as stored, and its errors. A weight that is zero everywhere gives exactly
        zero, a zero column svh = 0, a zero row suh = 0.

    Raises:
        FormatError: shapes do not fit, a value is not finite, or the magnitudes do not fit
            float16 scales.
        ConversionError: H is not positive semidefinite.
    """
    started = time.perf_counter()
    _check(weight_KN, hessian)
    bias_N = None if bias_N is None else _stored_bias(bias_N, weight_KN.shape[1])
    largest = largest_magnitude(weight_KN)
    if hessian is not None and hessian.fallback:
        hessian = None
    if largest == 0:
        tensor, g_scale = _zero_tensor(weight_KN, settings, bias_N), 1.0
        errors: tuple[float | None, float] = (0.0, 0.0)
    else:
        with exact_float32_matmul():
            near_one_KN, exponent = normalize(weight_KN, largest)
            task = _Task(near_one_KN, exponent, hessian, settings)
            tensor, g_scale, errors = _quantize(task, bias_N, progress)
    report = QuantReport(
        proxy_error=errors[0],
        rmse=errors[1],
        g_scale=g_scale,
        out_scales=settings.out_scales,
        fallback=hessian is None,
        zeros=largest == 0,
        seconds=time.perf_counter() - started,
    )
    return tensor, report


@dataclass(frozen=True, slots=True)
class _Task:
    """A weight that is not all zero: weight_KN * 2**exponent, with its usable Hessian if any."""

    weight_KN: Tensor
    exponent: int
    hessian: Hessian | None
    settings: QuantSettings

    def damped_metric(self) -> Tensor:
        """H with its damping, original basis; the identity where there is no H."""
        if self.hessian is None:
            return torch.eye(self.weight_KN.shape[0], device=self.weight_KN.device)
        metric_KK = self.hessian.matrix.clone()
        metric_KK.diagonal().add_(self.hessian.damping())
        return metric_KK


def _quantize(
    task: _Task, bias_N: Tensor | None, progress: Progress | None
) -> tuple[Exl3Tensor, float, tuple[float | None, float]]:
    """The tensor, its global scale, and its (proxy error, rmse)."""
    weight_KN, hessian, settings = task.weight_KN, task.hessian, task.settings
    if hessian is None:
        signs_K = random_signs(weight_KN.shape[0], settings.seed, Stream.INPUT_SIGNS)
    else:
        signs_K = hessian.signs_K
    regular = regularize(weight_KN, hessian, signs_K, settings.out_scales, settings.seed)
    sample = _sample(weight_KN, regular, settings.seed)
    g_scale = search_scale(sample, settings.bits, settings.codebook)
    trellis, inner_KN = _code(task, regular, g_scale, progress)

    # What was divided out before coding comes back as scales; empty channels become exact 0.
    su_K = torch.where(regular.zero_rows_K, 0.0, regular.su_K / g_scale)
    sv_N = torch.where(regular.zero_columns_N, 0.0, regular.sv_N)
    su_K, sv_N = refit_scales(weight_KN, inner_KN, su_K, sv_N, task.damped_metric())
    suh_K, svh_N = to_stored_scales(su_K, sv_N, task.exponent)

    stored_su_K = (suh_K.to(torch.float64) * 2.0**-task.exponent).to(torch.float32)
    matrix_KK = None if hessian is None else hessian.matrix
    errors = weight_errors(weight_KN, inner_KN, stored_su_K, svh_N, matrix_KK)
    return Exl3Tensor(trellis, suh_K, svh_N, settings.codebook, bias_N), g_scale, errors


def _sample(weight_KN: Tensor, regular: Regularization, seed: int) -> Tensor:
    """Regularised tiles for the scale search: float32 ``(samples, 256)``."""
    k, n = weight_KN.shape
    positions = sample_positions(k // TILE, n // TILE, seed)
    rows, columns_of = positions // (n // TILE), positions % (n // TILE)
    parts = []
    for columns in column_chunks(k, n):
        first, last = columns.start // TILE, columns.stop // TILE
        inside = (columns_of >= first) & (columns_of < last)
        if bool(inside.any()):
            tiles_KN = regular.forward(weight_KN, columns)
            parts.append(gather_tiles(tiles_KN, rows[inside], columns_of[inside] - first))
    return torch.cat(parts)


def _code(
    task: _Task, regular: Regularization, g_scale: float, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """Packed trellis ``(k/16, n/16, 16 K)`` and codebook values, float16 ``(k, n)``."""
    weight_KN, hessian, settings = task.weight_KN, task.hessian, task.settings
    k, n = weight_KN.shape
    feedback_KK = None
    if hessian is not None:
        feedback_KK = block_ldl(regular.metric(hessian), hessian.sigma_reg)
    trellis = torch.empty(
        k // TILE, n // TILE, TILE * settings.bits, dtype=torch.int16, device=weight_KN.device
    )
    inner_KN = torch.empty(k, n, dtype=torch.float16, device=weight_KN.device)
    for columns in column_chunks(k, n):
        target_KN = regular.forward(weight_KN, columns).mul_(g_scale)
        report = _part_of(progress, columns, n)
        if feedback_KK is None:
            values_KN, states = quantize_without_feedback(
                target_KN, settings.bits, settings.codebook, report
            )
        else:
            values_KN, states = quantize_with_feedback(
                target_KN, feedback_KK, settings.bits, settings.codebook, report
            )
        inner_KN[:, columns] = values_KN  # exact: codebook values are float16
        tiles = slice(columns.start // TILE, columns.stop // TILE)
        trellis[:, tiles] = ops.pack(states, settings.bits)
    return trellis, inner_KN


def _part_of(progress: Progress | None, columns: slice, n: int) -> Progress | None:
    """Progress of a column range as progress of the whole weight."""
    if progress is None:
        return None
    return lambda share: progress((columns.start + share * (columns.stop - columns.start)) / n)


def _check(weight_KN: Tensor, hessian: Hessian | None) -> None:
    shape = tuple(weight_KN.shape)
    if (
        weight_KN.dim() != 2
        or not weight_KN.is_floating_point()
        or 0 in shape
        or any(size % HADAMARD_BLOCK for size in shape)
    ):
        raise FormatError(
            f"weight: shape is {shape} and dtype {weight_KN.dtype}, expected floating point "
            f"(k, n), both positive multiples of {HADAMARD_BLOCK}; use pad_weight"
        )
    if hessian is not None and hessian.in_features != shape[0]:
        raise FormatError(
            f"weight of shape (k, n) = {shape} got a Hessian over {hessian.in_features} channels, "
            f"expected k; it belongs to another activation or is not padded"
        )
    if hessian is not None and hessian.matrix.device != weight_KN.device:
        raise FormatError(
            f"weight is on {weight_KN.device} and its Hessian on {hessian.matrix.device}; move "
            f"one with .to(device)"
        )


def _stored_bias(bias_N: Tensor, n: int) -> Tensor:
    stored = bias_N.to(torch.float16)
    if bias_N.shape != (n,) or not bool(stored.isfinite().all()):
        raise FormatError(
            f"bias: shape is {tuple(bias_N.shape)} and largest magnitude "
            f"{float(bias_N.abs().max()):.3g}, expected ({n},), finite in float16 (up to 65504)"
        )
    return stored


def _zero_tensor(weight_KN: Tensor, settings: QuantSettings, bias_N: Tensor | None) -> Exl3Tensor:
    """Scales of 0 over a trellis of zeros: decodes to exactly 0."""
    k, n = weight_KN.shape
    return Exl3Tensor(
        weight_KN.new_zeros(k // TILE, n // TILE, TILE * settings.bits, dtype=torch.int16),
        weight_KN.new_zeros(k, dtype=torch.float16),
        weight_KN.new_zeros(n, dtype=torch.float16),
        settings.codebook,
        bias_N,
    )
