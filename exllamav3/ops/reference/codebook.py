"""The three procedural codebooks in plain torch: trellis state -> float16 value.

Source: docs/format.md, section "Codebooks".
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

INST3, MCG, MUL1 = 0, 1, 2
STATES = 1 << 16

_MASK32 = 0xFFFFFFFF
_HALVES_MASK, _HALVES_FLIP = 0x8FFF8FFF, 0x3B603B60
_MUL1_SCALE = 0.00676727294921875  # float16 bits 0x1EEE
_MUL1_OFFSET = -10.3828125  # float16 bits 0xC931


@cache
def codebook_values(codebook: int) -> Tensor:
    """All 65536 values of a codebook, indexed by state: float16 on the CPU. Do not modify."""
    state = torch.arange(STATES, dtype=torch.int64)
    if codebook == MUL1:
        hashed = (state * 0x83DCD12D) & _MASK32
        byte_sum = torch.stack([(hashed >> shift) & 0xFF for shift in (0, 8, 16, 24)]).sum(0)
        # Product and sum need at most 22 bits, so float32 is exact and .half() rounds once.
        return ((byte_sum + 1024).float() * _MUL1_SCALE + _MUL1_OFFSET).half()
    hashed = state * 0xCBAC1FED if codebook == MCG else state * 89226354 + 64248484
    halves = ((hashed & _MASK32) & _HALVES_MASK) ^ _HALVES_FLIP
    return (_half_from_bits(halves & 0xFFFF).float() + _half_from_bits(halves >> 16).float()).half()


def _half_from_bits(bits: Tensor) -> Tensor:
    signed = torch.where(bits < 0x8000, bits, bits - 0x10000)
    return signed.to(torch.int16).view(torch.float16)
