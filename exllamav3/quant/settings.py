"""What a caller decides about one quantized linear, and what it is told afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError
from exllamav3.util.rates import INTEGER_BITS


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """Choices for one linear.

    bits: integer K in 1..8, bits per weight of the trellis
    codebook: the procedural codebook
    out_scales: scale output channels (svh carries magnitudes) or only flip their signs
    seed: of the output signs and of the tiles that the scale search looks at

    Raises:
        FormatError: ``bits`` is not a rate that is written.
    """

    bits: int
    codebook: Codebook
    out_scales: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in INTEGER_BITS or isinstance(self.bits, bool):
            raise FormatError(
                f"quantizer settings: bits is {self.bits!r}, expected an integer from 1 to 8; "
                f"half-integer rates are read but never written"
            )


@dataclass(frozen=True, slots=True)
class QuantReport:
    """Outcome of one linear; errors are those of the tensors as stored (float16 scales).

    proxy_error: tr(E^T H E) / tr(W^T H W) in the original basis with the undamped H,
        E = W - W_hat; None where there was no usable H
    rmse: sqrt(sum E^2 / sum W^2), the relative error of the weights alone
    g_scale: global scale found by the search; near 0.73 (mul1) or 0.92 for Gaussian weights
    out_scales: whether svh carries magnitudes
    fallback: quantized without error feedback, because H was absent or unusable
    zeros: the weight was zero everywhere, and so is the result
    seconds: wall time
    """

    proxy_error: float | None
    rmse: float | None
    g_scale: float
    out_scales: bool
    fallback: bool
    zeros: bool
    seconds: float
