"""The rates K of the EXL3 format, in bits per weight. Source: docs/format.md."""

from __future__ import annotations

INTEGER_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Rates that are read and written."""
HALF_BITS = (1.5, 2.5, 3.5)
"""Rates that are read (codebook mul1 only) and never written."""
RATES = "1..8 or one of 1.5, 2.5, 3.5"
"""All of them, for messages."""


def rate_of(words: int) -> int | float | None:
    """K of a trellis whose tiles take `words` = 16 K words of 16 bits, None if there is none."""
    bits: int | float = words // 16 if words % 16 == 0 else words / 16
    return bits if bits in INTEGER_BITS or bits in HALF_BITS else None
