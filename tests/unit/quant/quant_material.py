"""Shared material: correlated activations, and a tile quantizer that costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 0.5


def grid_quantizer(tiles: Tensor, bits: int, codebook: object) -> tuple[Tensor, Tensor]:
    """Round to multiples of 0.5 within +-3: an honest quantizer of about 3.7 bits."""
    values = (tiles / GRID).round().clamp(-6, 6) * GRID
    return values, torch.zeros(tiles.shape, dtype=torch.int16, device=tiles.device)


def correlated_rows(tokens: int, width: int, seed: int) -> Tensor:
    """Activations with a decaying spectrum and uneven channels: float32 ``(tokens, width)``."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    spectrum = torch.arange(1, width + 1).to(torch.float32).pow(-0.5)
    channels = torch.randn(width, generator=generator).mul(0.7).exp()
    return torch.randn(tokens, width, generator=generator) * spectrum @ basis * channels


def uneven_weight(k: int, n: int, seed: int) -> Tensor:
    """Gaussian weight with uneven rows and columns: float32 ``(k, n)``."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(k, 1, generator=generator).mul(0.5).exp()
    columns = torch.randn(n, generator=generator).mul(0.5).exp()
    return 0.02 * torch.randn(k, n, generator=generator) * rows * columns
