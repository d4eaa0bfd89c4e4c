"""Magnitudes: weights far from 1 on the way in, float16 suh and svh on the way out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.quant.chunks import column_chunks

LARGEST = 65504.0
SMALLEST_NORMAL = 2.0**-14
LOST_SHARE = 2.0**-8
"""Relative RMS change of all scales by rounding beyond which a weight is refused."""


NEAR_ONE = 20
"""Weights whose largest magnitude is within 2**+-NEAR_ONE are computed with as they are."""


def largest_magnitude(weight_KN: Tensor) -> float:
    """max |w| of a ``(k, n)`` weight, all of it finite.

    Raises:
        FormatError: a value is not finite; the message names the first one.
    """
    largest = float(
        torch.stack([_peak(weight_KN, c) for c in column_chunks(*weight_KN.shape)]).max()
    )
    if math.isfinite(largest):
        return largest
    bad = (~weight_KN.isfinite()).nonzero()
    row, column = bad[0].tolist()
    raise FormatError(
        f"weight: {len(bad)} of {weight_KN.numel()} values are not finite, the first is "
        f"{float(weight_KN[row, column])} at input {row}, output {column} of (k, n) = "
        f"{tuple(weight_KN.shape)}; only finite weights can be quantized, repair the source tensor"
    )


def _peak(weight_KN: Tensor, columns: slice) -> Tensor:
    """max |w| of a column range, NaN if there is one."""
    return weight_KN[:, columns].abs().amax().to(torch.float64)


def normalize(weight_KN: Tensor, largest: float) -> tuple[Tensor, int]:
    """Bring a weight near 1 so that sums of squares neither over- nor underflow.

    Args:
        weight_KN: ``(k, n)``.
        largest: its largest magnitude, positive.

    Returns:
        (weight / 2**exponent, exponent); an ordinary weight is returned as it is, with 0.
    """
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= NEAR_ONE:
        return weight_KN, 0
    exponent = min(max(exponent, -125), 125)  # a power of two that float32 can hold
    return weight_KN.to(torch.float32) * 2.0**-exponent, exponent


def to_stored_scales(su_K: Tensor, sv_N: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Round scales to float16, moving a power of two between the two sides where needed.

    Only the product of the two sides matters, so a weight that is too small or too large for
    one of them is spread over both. Ordinary weights are not touched.

    Args:
        su_K, sv_N: float32 scales; zeros are kept.
        exponent: power of two by which the weight is larger than the scales say.

    Returns:
        float16 suh ``(k,)`` and svh ``(n,)`` with suh x svh = su x sv x 2**exponent.

    Raises:
        FormatError: the weight is too large or too small for any pair of float16 scales.
    """
    su64_K = su_K.to(torch.float64) * 2.0**exponent
    sv64_N = sv_N.to(torch.float64)
    shift = _shift(su64_K, sv64_N)
    sides = []
    for name, side in (
        ("suh", su64_K * 2.0**shift),
        ("svh", sv64_N * 2.0**-shift),
    ):
        stored = side.to(torch.float16)
        lost = torch.linalg.vector_norm(stored.to(torch.float64) - side)
        whole = torch.linalg.vector_norm(side)
        if not float(lost) <= LOST_SHARE * float(whole):
            raise FormatError(
                f"{name}: scales up to {float(side.abs().max()):.3g} do not fit float16, whose "
                f"range is {SMALLEST_NORMAL:.3g} to {LARGEST:.0f}, even after moving magnitude "
                f"between suh and svh; the weight is too large or too small for EXL3: rescale it "
                f"or leave this linear unquantized"
            )
        sides.append(stored)
    return sides[0], sides[1]


def _shift(su_K: Tensor, sv_N: Tensor) -> int:
    """Power of two to multiply su with (and divide sv by): 0 if both fit as they are.

    Otherwise the smallest move that brings everything into the normal range. Where nothing
    does, overflow is avoided first and the smallest scales lose bits.
    """
    (su_low, su_high), (sv_low, sv_high) = _range(su_K), _range(sv_N)
    least = math.ceil(math.log2(sv_high / LARGEST))
    most = math.floor(math.log2(LARGEST / su_high))
    wanted_least = max(least, math.ceil(math.log2(SMALLEST_NORMAL / su_low)))
    wanted_most = min(most, math.floor(math.log2(sv_low / SMALLEST_NORMAL)))
    if wanted_least <= wanted_most:
        return min(max(0, wanted_least), wanted_most)
    # Nothing suits all: put the largest scales of both sides at the same height.
    middle = round((math.log2(sv_high) - math.log2(su_high)) / 2)
    return min(max(middle, least), most)


def _range(side: Tensor) -> tuple[float, float]:
    """Smallest and largest magnitude that is not zero; (1, 1) if there is none."""
    magnitude = side.abs()
    live = magnitude[magnitude > 0]
    if live.numel() == 0:
        return 1.0, 1.0
    return float(live.min()), float(live.max())
