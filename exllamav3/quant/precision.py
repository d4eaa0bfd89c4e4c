"""Exact float32 matrix products, whatever precision the caller allows elsewhere.

Error feedback multiplies small differences by large sums. TF32 and bfloat16 products keep
10 and 7 bits of mantissa, which would lose the differences, so the quantizer asks for IEEE
float32 for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32_matmul() -> Iterator[None]:
    """Switch reduced-precision float32 products off, and the caller's settings back on after.

    Covers cuBLAS (TF32) and oneDNN (TF32, bfloat16). The settings are process-wide: other
    threads see exact products too while the block runs.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
