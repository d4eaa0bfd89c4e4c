"""Cutting a wide weight into column ranges that bound the working memory.

Every stage of the quantizer treats output columns independently once the shared factors
are known, so it walks these ranges. The size is a constant, not a function of free memory:
results may depend on how a matrix product is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from exllamav3.codec.params import HADAMARD_BLOCK

CHUNK_WEIGHTS = 2**27
"""Most weights worked on at once; a float32 buffer of that size is 512 MiB."""


def column_chunks(k: int, n: int) -> Iterator[slice]:
    """Column ranges of a ``(k, n)`` weight, on 128-column edges, of at most CHUNK_WEIGHTS."""
    width = max(CHUNK_WEIGHTS // k // HADAMARD_BLOCK, 1) * HADAMARD_BLOCK
    for start in range(0, n, width):
        yield slice(start, min(start + width, n))
