"""Codebook tables, for tests and for code that looks at a codebook as a set of values."""

from __future__ import annotations

from torch import Tensor

from exllamav3.codec.params import Codebook
from exllamav3.ops.reference.codebook import codebook_values


def codebook_table(codebook: Codebook) -> Tensor:
    """All 65536 values by state: float16 on the CPU. Shared: do not modify.

    Source: docs/format.md, section "Codebooks".
    """
    return codebook_values(codebook.id)
