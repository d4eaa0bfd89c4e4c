"""Fixtures of the quantizer's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quant_material import grid_quantizer
from torch import Tensor

from exllamav3 import ops


@pytest.fixture
def grid_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Tensor, Tensor]]:
    """Replace the trellis search by a rounding grid, for tests about what is around it."""
    monkeypatch.setattr(ops, "quantize_tiles", grid_quantizer)
    return grid_quantizer
