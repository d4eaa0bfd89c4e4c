"""How far a quantized module's outputs are from those of the module it replaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

REFERENCE_ROWS = 5
"""Calibration rows on which modules are compared."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Averages over rows; both modules received the same inputs.

    relative_error: ||y - ref|| / ||ref||, Frobenius
    cosine_error: 1 - mean cosine over tokens
    sqnr_db: 10 log10(||ref||^2 / ||y - ref||^2)
    """

    relative_error: float
    cosine_error: float
    sqnr_db: float


def compare(references: Sequence[Tensor], outputs: Sequence[Tensor]) -> Fidelity | None:
    """Compare rows of `(tokens, width)`; None without rows or with an all-zero reference."""
    relative, cosine, sqnr = [], [], []
    for reference, output in zip(references, outputs, strict=True):
        wanted, got = reference.double(), output.double()
        signal, noise = torch.linalg.norm(wanted).item(), torch.linalg.norm(got - wanted).item()
        if signal == 0.0:
            return None
        relative.append(noise / signal)
        cosine.append(1.0 - F.cosine_similarity(wanted, got, dim=-1).mean().item())
        sqnr.append(20.0 * math.log10(signal / noise) if noise else math.inf)
    if not relative:
        return None
    count = len(relative)
    return Fidelity(sum(relative) / count, sum(cosine) / count, sum(sqnr) / count)
