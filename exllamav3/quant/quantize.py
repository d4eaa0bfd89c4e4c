"""Quantize one linear: regularise, search the scale, code with feedback, refit, measure.

Peak memory for a weight of k x n, besides the weight itself and H (4 k^2 bytes), with c the
columns worked on at once (k c <= CHUNK_WEIGHTS):
    2 k n          codebook values, float16
    K/8 k n        packed trellis
    10 k c         coding: target, running values, states   (16 k c while refitting)
    8 k^2          metric and its factor                    (12 k^2 while factoring or refitting)
A 151936-column lm_head on 5120 inputs needs about 5 GB at 6 bits, a 5120 x 14336 weight 2 GB.

The result is a function of (weight, H, settings) on one machine. Tile quantizer results do
not depend on the number of threads; those of the float32 products of the BLAS behind torch
may, so a caller that promises identical bytes keeps `torch.get_num_threads()` fixed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from exllamav3 import ops
from exllamav3.codec.params import HADAMARD_BLOCK, TILE
from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.errors import FormatError
from exllamav3.quant.chunks import column_chunks
from exllamav3.quant.hessian import Hessian, random_signs
from exllamav3.quant.ldl import block_ldl
from exllamav3.quant.ldlq import quantize_with_feedback, quantize_without_feedback
from exllamav3.quant.magnitude import largest_magnitude, normalize, to_stored_scales
from exllamav3.quant.metrics import weight_errors
from exllamav3.quant.precision import exact_float32_matmul
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
        tensor = _zero_tensor(weight_KN, settings, bias_N)
        seconds = time.perf_counter() - started
        report = QuantReport(0.0, 0.0, 1.0, settings.out_scales, hessian is None, True, seconds)
        return tensor, report
    with exact_float32_matmul():
        near_one_KN, exponent = normalize(weight_KN, largest)
        return _quantize(near_one_KN, exponent, hessian, settings, bias_N, progress, started)
