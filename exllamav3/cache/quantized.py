"""Keys and values at 2 to 8 bits a lane.

A token's lanes, all heads one after the other, are cut into groups of 32. Each group is rotated by
the orthonormal 32-point Hadamard transform, which spreads outliers over the group, and rounded to
`2^bits` evenly spaced levels around 0:

    scale = 2 max|r| / (2^bits - 1);   q = round(r / scale + (2^bits - 1) / 2);   0 <= q < 2^bits

so a rotated lane is off by at most half a scale, and the rotation keeps that error's norm. Words
hold bit planes: bit i of word j is bit j of lane i, so packing needs no shift across words. With
its float16 scale a lane costs `bits + 0.5` bits. This form lives in memory only.

Everything is read back into the dtype of the activations before attention: it saves memory, not
time. Suffixes: T places, N tokens, G groups, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.cache.kv import read_rows
from exllamav3.cache.pages import PAGE_SIZE
from exllamav3.errors import FormatError, UnsupportedError

GROUP = 32
CACHE_BITS = range(2, 9)


def check_cache_bits(name: str, bits: int) -> None:
    """FormatError unless `bits` is a rate of the cache."""
    if isinstance(bits, bool) or bits not in CACHE_BITS:
        raise FormatError(f"Cache: {name} is {bits!r}, expected 2 to 8, or None for no rounding")


class QuantizedKvLayer:
    """A `KvLayer` that rounds what it stores.

    Args:
        pages: number of pages.
        kv_heads, head_dim: geometry of a token.
        k_bits, v_bits: 2 to 8.
        dtype, device: of the activations.

    Raises:
        UnsupportedError: a token has a number of lanes that is no multiple of 32.
    """

    def __init__(
        self,
        pages: int,
        kv_heads: int,
        head_dim: int,
        bits: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        lanes = kv_heads * head_dim
        if lanes % GROUP:
            raise UnsupportedError(
                f"Cache: {kv_heads} heads of {head_dim} are {lanes} lanes a token, and the "
                f"quantized cache needs a multiple of {GROUP}; leave k_bits and v_bits out"
            )
        self._heads = (kv_heads, head_dim)
        self._dtype = dtype
        places, groups = pages * PAGE_SIZE, lanes // GROUP
        self._k, self._v = (_Store(places, groups, b, device) for b in bits)

    def write(self, places_N: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Round and store N tokens at the given places."""
        self._k.write(places_N, k_NHD.flatten(1))
        self._v.write(places_N, v_NHD.flatten(1))

    def read(self, pages_BP: Tensor, tokens: int, first_place: int | None) -> tuple[Tensor, Tensor]:
        """Return the first `tokens` tokens of each row."""
        k, v = (store.read(pages_BP, tokens, first_place) for store in (self._k, self._v))
        return (
            k.to(self._dtype).unflatten(-1, self._heads),
            v.to(self._dtype).unflatten(-1, self._heads),
        )

    def clear(self, pages: Tensor) -> None:
        """Zero some pages."""
        self._k.clear(pages)
        self._v.clear(pages)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._k.device

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self._k.size_bytes + self._v.size_bytes


class _Store:
    """Rounded groups and their scales."""

    def __init__(self, places: int, groups: int, bits: int, device: torch.device) -> None:
        self._bits = bits
        self._words_TGW = torch.zeros((places, groups, bits), dtype=torch.int32, device=device)
        self._scales_TG = torch.zeros((places, groups), dtype=torch.float16, device=device)
        self._hadamard = _hadamard(device)
        self._lane = torch.arange(GROUP, dtype=torch.int32, device=device)

    def write(self, places_N: Tensor, x_NL: Tensor) -> None:
        rotated = x_NL.float().unflatten(-1, (-1, GROUP)) @ self._hadamard
        levels = 2**self._bits - 1
        largest = torch.finfo(torch.float16).max
        scale = (2 / levels * rotated.abs().amax(-1)).clamp(max=largest).half()
        # A group of zeros has scale 0: whatever its q, it is read back as zeros.
        steps = rotated / scale.float().clamp(min=1e-30)[..., None]
        q = (steps + levels / 2).round().clamp(0, levels).int()
        planes = [
            ((q >> j & 1) << self._lane).sum(-1, dtype=torch.int32) for j in range(self._bits)
        ]
        self._words_TGW.index_copy_(0, places_N, torch.stack(planes, dim=-1))
        self._scales_TG.index_copy_(0, places_N, scale)

    def read(self, pages_BP: Tensor, tokens: int, first_place: int | None) -> Tensor:
        words = read_rows(self._words_TGW, pages_BP, tokens, first_place)
        scales = read_rows(self._scales_TG, pages_BP, tokens, first_place)
        q = (words[..., :1] >> self._lane) & 1
        for j in range(1, self._bits):
            q |= (words[..., j : j + 1] >> self._lane & 1) << j
        rotated = (q.float() - (2**self._bits - 1) / 2) * scales.float()[..., None]
        return (rotated @ self._hadamard).flatten(-2)  # the transform is its own inverse

    def clear(self, pages: Tensor) -> None:
        for storage in (self._words_TGW, self._scales_TG):
            storage.unflatten(0, (-1, PAGE_SIZE)).index_fill_(0, pages.to(storage.device), 0)

    @property
    def device(self) -> torch.device:
        return self._words_TGW.device

    @property
    def size_bytes(self) -> int:
        return 4 * self._words_TGW.numel() + 2 * self._scales_TG.numel()


def _hadamard(device: torch.device) -> Tensor:
    """The orthonormal 32-point Hadamard matrix in Sylvester order; symmetric."""
    matrix = torch.ones((1, 1), device=device)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / GROUP**0.5
