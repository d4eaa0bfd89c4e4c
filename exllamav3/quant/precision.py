"""Exact float32 matrix products, whatever precision the caller allows elsewhere.

Error feedback multiplies small differences by large sums. TF32 and bfloat16 products keep
10 and 7 bits of mantissa, which would lose the differences, so the quantizer asks for IEEE
float32 for as long as it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_before: list[str] = []
"""Settings to restore, while any block runs."""
_running = 0
"""Blocks that run now, in any thread."""


@contextmanager
def exact_float32_matmul() -> Iterator[None]:
    """Switch reduced-precision float32 products off, and the caller's settings back on after.

    Covers cuBLAS (TF32) and oneDNN (TF32, bfloat16). The settings are process-wide: other
    threads see exact products too while a block runs, and where blocks of several threads
    overlap (one a device), the last one to end switches back.
    """
    global _running
    with _lock:
        _running += 1
        if _running == 1:
            _before[:] = [backend.fp32_precision for backend in _backends()]
            for backend in _backends():
                backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                for backend, precision in zip(_backends(), _before, strict=True):
                    backend.fp32_precision = precision


def _backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
