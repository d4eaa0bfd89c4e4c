"""Constants of the EXL3 format: tile and Hadamard sizes, codebooks. Rates: `util.rates`.

Source: docs/format.md.
"""

from __future__ import annotations

from enum import Enum

from exllamav3.errors import FormatError
from exllamav3.util.rates import RATES, rate_of

TILE = 16
"""Edge of a trellis tile: 16 input rows by 16 output columns."""
TILE_WEIGHTS = TILE * TILE
"""Weights of a tile, which is also the length of its trellis ring."""
HADAMARD_BLOCK = 128
"""Channels rotated together on either side of a weight."""


class Codebook(Enum):
    """A procedural codebook: the map of a 16-bit trellis state to a float16 value."""

    INST3 = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"

    @property
    def id(self) -> int:
        """Number by which ops know the codebook: 0, 1 or 2."""
        return {"3inst": 0, "mcg": 1, "mul1": 2}[self.value]

    @property
    def marker(self) -> str | None:
        """Suffix of the marker tensor, or None for 3inst, which has none."""
        return None if self is Codebook.INST3 else self.value

    @property
    def multiplier(self) -> int | None:
        """Unsigned 32-bit value of the marker tensor, or None for 3inst."""
        return {"3inst": None, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[self.value]

    @classmethod
    def from_name(cls, name: str) -> Codebook:
        """Look a codebook up by its name; FormatError lists the names there are."""
        for codebook in cls:
            if codebook.value == name:
                return codebook
        raise FormatError(f"codebook {name!r} is unknown: use one of 3inst, mcg, mul1")


def pad_to_block(size: int) -> int:
    """Round a channel count up to whole Hadamard blocks of 128."""
    return -(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK


def bits_of_trellis(last_dim: int, where: str = "trellis") -> int | float:
    """Rate K of a trellis from its last dimension, 16 K.

    Raises:
        FormatError: the dimension belongs to no rate of the format.
    """
    bits = rate_of(last_dim)
    if bits is None:
        raise FormatError(
            f"{where}: last dimension is {last_dim}, expected 16*K with K in {RATES}; the file "
            f"is damaged or not EXL3"
        )
    return bits
