"""Second moments of a linear's input: accumulation, merging, damping, fallback decision.

H = (1/T) sum over tokens of x^T x, x the activation row zero-extended to whole 128-blocks.
Linears that read the same activation share one `Hessian`, and with it the input signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.codec.params import HADAMARD_BLOCK
from exllamav3.errors import FormatError
from exllamav3.quant.precision import exact_float32_matmul
from exllamav3.quant.randomness import Stream, random_signs

SIGMA_REG = 0.025
"""Share of the mean diagonal that is added to the diagonal before factoring."""
SMALLEST_MEAN_DIAGONAL = 1e-20
"""Below this mean square the activations carry no information."""


@dataclass(frozen=True, slots=True)
class Hessian:
    """A finished second-moment matrix.

    matrix: float32 ``(k, k)``, symmetric, undamped
    count: activation rows in the mean
    signs_K: float32 ``(k,)`` of +-1, the input signs of every linear that shares this matrix
    sigma_reg: damping as a share of the mean diagonal
    fallback: the matrix is unusable (no rows, zero, or not finite)
    """

    matrix: Tensor
    count: int
    signs_K: Tensor
    sigma_reg: float
    fallback: bool

    @property
    def in_features(self) -> int:
        """Padded input width k."""
        return self.matrix.shape[0]

    def damping(self) -> Tensor:
        """What is added to the diagonal: sigma_reg * mean(diag H), float32 scalar."""
        return self.sigma_reg * self.matrix.diagonal().mean()

    def to(self, device: torch.device | str) -> Hessian:
        """The same matrix and signs on another device."""
        return Hessian(
            self.matrix.to(device),
            self.count,
            self.signs_K.to(device),
            self.sigma_reg,
            self.fallback,
        )


class HessianAccumulator:
    """Sums x^T x in float32 on one device.

    Args:
        in_features: padded input width k, a multiple of 128.
        device: where the sum lives and where rows are expected.

    Raises:
        FormatError: ``in_features`` is not a positive multiple of 128.
    """

    def __init__(self, in_features: int, device: torch.device | str) -> None:
        if in_features <= 0 or in_features % HADAMARD_BLOCK:
            raise FormatError(
                f"Hessian: in_features is {in_features}, expected a positive multiple of "
                f"{HADAMARD_BLOCK}; pass the padded width"
            )
        self.in_features = in_features
        self._sum_KK = torch.zeros(in_features, in_features, device=device)
        # Kept on the device: reading it after every batch would make the GPU wait.
        self._count = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, x: Tensor) -> None:
        """Add activation rows.

        Args:
            x: floating point ``(..., width)``, width at most ``in_features``. Narrower rows
                are zero-extended; rows with a non-finite value are left out.

        Raises:
            FormatError: ``x`` is wider than the matrix or not floating point.
        """
        width = x.shape[-1] if x.dim() else 0
        if not 0 < width <= self.in_features or not x.is_floating_point():
            raise FormatError(
                f"Hessian: activation has shape {tuple(x.shape)} and dtype {x.dtype}, expected "
                f"floating point (..., width) with width from 1 to {self.in_features}"
            )
        rows_TW = x.detach().reshape(-1, width).to(self._sum_KK.device)
        finite_T = rows_TW.isfinite().all(dim=1)
        # A masked product would spread 0 * nan; selecting rows would wait for the device.
        rows_TW = rows_TW.where(finite_T[:, None], 0.0)
        self._add_product(self._sum_KK[:width, :width], rows_TW)
        self._count += finite_T.sum()

    @staticmethod
    def _add_product(sum_WW: Tensor, rows_TW: Tensor) -> None:
        """sum += rows^T rows, every product exact, sums in float32."""
        if rows_TW.is_cuda and rows_TW.dtype == torch.float16:
            # Products of float16 are exact in float32, so tensor cores lose nothing, and are ten
            # times as fast: without them, a wide down projection would take longer here than in
            # the trellis search.
            torch.addmm(sum_WW, rows_TW.T, rows_TW, out_dtype=torch.float32, out=sum_WW)
            return
        rows_TW = rows_TW.to(torch.float32)
        with exact_float32_matmul():
            sum_WW.addmm_(rows_TW.T, rows_TW)

    def merge(self, other: HessianAccumulator) -> None:
        """Add what another device has accumulated for the same activation.

        Raises:
            FormatError: the widths differ.
        """
        if other.in_features != self.in_features:
            raise FormatError(
                f"Hessian: cannot merge a sum over {other.in_features} channels into one over "
                f"{self.in_features}; both must belong to the same activation"
            )
        self._sum_KK += other._sum_KK.to(self._sum_KK.device)
        self._count += other._count.to(self._count.device)

    def finish(self, seed: int, sigma_reg: float = SIGMA_REG) -> Hessian:
        """Turn the sum into a mean and draw the input signs.

        Args:
            seed: of the input signs, which are drawn on the CPU so that every device agrees.
            sigma_reg: damping as a share of the mean diagonal.
        """
        count = int(self._count.item())
        matrix_KK = self._sum_KK / max(count, 1)
        matrix_KK = (matrix_KK + matrix_KK.T) / 2  # products need not be exactly symmetric
        return make_hessian(matrix_KK, count, seed, sigma_reg)


def make_hessian(matrix_KK: Tensor, count: int, seed: int, sigma_reg: float = SIGMA_REG) -> Hessian:
    """Wrap a given second-moment matrix: decide on the fallback and draw the input signs.

    Args:
        matrix_KK: float32 ``(k, k)``, undamped mean of x^T x, k a multiple of 128.
        count: activation rows in the mean; 0 means that there are none.
        seed: of the input signs.
        sigma_reg: damping as a share of the mean diagonal.

    Raises:
        FormatError: the matrix is not square, or not of whole 128-blocks.
    """
    k = matrix_KK.shape[0]
    if matrix_KK.shape != (k, k) or k == 0 or k % HADAMARD_BLOCK:
        raise FormatError(
            f"Hessian: matrix has shape {tuple(matrix_KK.shape)}, expected (k, k) with k a "
            f"positive multiple of {HADAMARD_BLOCK}"
        )
    matrix_KK = matrix_KK.to(torch.float32)
    mean = matrix_KK.diagonal().mean()
    usable = bool(matrix_KK.isfinite().all()) and float(mean) >= SMALLEST_MEAN_DIAGONAL
    signs_K = random_signs(k, seed, Stream.INPUT_SIGNS).to(matrix_KK.device)
    return Hessian(matrix_KK, count, signs_K, sigma_reg, fallback=count == 0 or not usable)
