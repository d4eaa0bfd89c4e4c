"""A decoder written from docs/format.md alone, in numpy and one bit at a time.

It shares no code with the library, so an error would have to be made twice to stay hidden.
"""

from __future__ import annotations

import numpy as np


def symbol_bits(rate: float) -> list[int]:
    """D(t) of every step."""
    whole = int(rate)
    return [whole + (1 if rate != whole and t % 2 == 1 else 0) for t in range(256)]


def ring_of(tile: np.ndarray) -> list[int]:
    """Ring bits of one tile given as int16 or uint16."""
    words = np.ascontiguousarray(tile).view("<u4")
    return [(int(word) >> (31 - i)) & 1 for word in words for i in range(32)]


def states_of(tile: np.ndarray, rate: float) -> np.ndarray:
    """The 256 states of one tile."""
    ring = ring_of(tile)
    assert len(ring) == int(256 * rate)
    states, end = [], 0
    for width in symbol_bits(rate):
        end += width
        state = 0
        for position in range(end - 16, end):
            state = state << 1 | ring[position % len(ring)]
        states.append(state)
    return np.array(states, dtype=np.uint16)


def value_of(state: int, codebook: str) -> np.float16:
    """The float16 value of a state."""
    if codebook == "mul1":
        x = state * 0x83DCD12D % 2**32
        total = sum(x.to_bytes(4, "little"))
        scale = np.uint16(0x1EEE).view(np.float16).astype(np.float64)
        offset = np.uint16(0xC931).view(np.float16).astype(np.float64)
        return np.float16((1024 + total) * scale + offset)
    x = state * 0xCBAC1FED % 2**32 if codebook == "mcg" else (state * 89226354 + 64248484) % 2**32
    z = (x & 0x8FFF8FFF) ^ 0x3B603B60
    halves = np.array([z & 0xFFFF, z >> 16], dtype=np.uint16).view(np.float16)
    return np.float16(halves.astype(np.float64).sum())


def place_of(step: int) -> tuple[int, int]:
    """(row, column) of a step inside its tile."""
    bit = [(step >> i) & 1 for i in range(8)]
    row = 8 * bit[1] + 2 * (2 * bit[4] + bit[3]) + bit[0]
    column = 8 * bit[2] + (4 * bit[7] + 2 * bit[6] + bit[5])
    return row, column


def inner_matrix(trellis: np.ndarray, codebook: str) -> np.ndarray:
    """float16 ``(k, n)`` in the rotated basis."""
    k_tiles, n_tiles, size = trellis.shape
    matrix = np.zeros((16 * k_tiles, 16 * n_tiles), dtype=np.float16)
    for a in range(k_tiles):
        for b in range(n_tiles):
            for step, state in enumerate(states_of(trellis[a, b], size / 16)):
                row, column = place_of(step)
                matrix[16 * a + row, 16 * b + column] = value_of(int(state), codebook)
    return matrix


def rotation(size: int) -> np.ndarray:
    """P of a given size, float64."""
    block = np.array([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)])
    return np.kron(np.eye(size // 128), block / np.sqrt(128))


def weight_matrix(
    trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str
) -> np.ndarray:
    """float64 ``(k, n)`` in the original basis."""
    inner = inner_matrix(trellis, codebook).astype(np.float64)
    turned = rotation(len(suh)) @ inner @ rotation(len(svh))
    return suh.astype(np.float64)[:, None] * turned * svh.astype(np.float64)
