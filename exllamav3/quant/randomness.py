"""Random draws: functions of a seed and of what they are for, made on the CPU.

Each purpose has its own stream, so that equal seeds and sizes never give, say, input and
output signs that are the same numbers.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Stream(IntEnum):
    """What a draw is for."""

    INPUT_SIGNS = 0
    OUTPUT_SIGNS = 1
    SAMPLE = 2


def generator_for(seed: int, stream: Stream) -> torch.Generator:
    """A CPU generator that every device and every run agrees on."""
    # torch takes 64 bits; seeds derived from a digest may fill them all.
    return torch.Generator().manual_seed((len(Stream) * seed + stream) % 2**63)


def random_signs(size: int, seed: int, stream: Stream) -> Tensor:
    """Float32 ``(size,)`` of +-1, on the CPU."""
    generator = generator_for(seed, stream)
    return torch.randint(0, 2, (size,), generator=generator).to(torch.float32) * 2 - 1
