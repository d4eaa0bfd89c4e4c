"""Keys and values of one attention layer, stored in pages.

Suffixes: P pages, S tokens of a page (256), T places `page * 256 + offset`, B rows, H key-value
heads, D lanes of a head.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from exllamav3.cache.pages import PAGE_SIZE


class KvLayer(Protocol):
    """Storage of one layer."""

    def write(self, places_N: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Store N tokens at the given places."""
        ...

    def read(self, pages_BP: Tensor, tokens: int, first_place: int | None) -> tuple[Tensor, Tensor]:
        """Return the first `tokens` tokens of each row, k and v `(b, tokens, heads, head_dim)`.

        `first_place` is the place of token 0 where there is one row with consecutive pages.
        """
        ...

    def clear(self, pages: Tensor) -> None:
        """Zero some pages."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        ...


class PlainKvLayer:
    """Keys and values as they are: float32 on the CPU, float16 on a GPU.

    Args:
        pages: number of pages.
        kv_heads, head_dim: geometry of a token.
        dtype, device: of the storage, those of the activations.
    """

    def __init__(
        self, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (pages * PAGE_SIZE, kv_heads, head_dim)
        # Zeros, because what lies beyond the tokens of a row is read (and masked) as well.
        self._k_THD = torch.zeros(shape, dtype=dtype, device=device)
        self._v_THD = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, places_N: Tensor, k_NHD: Tensor, v_NHD: Tensor) -> None:
        """Store N tokens at the given places."""
        self._k_THD.index_copy_(0, places_N, k_NHD.to(self._k_THD.dtype))
        self._v_THD.index_copy_(0, places_N, v_NHD.to(self._v_THD.dtype))

    def read(self, pages_BP: Tensor, tokens: int, first_place: int | None) -> tuple[Tensor, Tensor]:
        """Return the first `tokens` tokens of each row; a view where pages are consecutive."""
        return (
            read_rows(self._k_THD, pages_BP, tokens, first_place),
            read_rows(self._v_THD, pages_BP, tokens, first_place),
        )

    def clear(self, pages: Tensor) -> None:
        """Zero some pages."""
        for storage in (self._k_THD, self._v_THD):
            storage.unflatten(0, (-1, PAGE_SIZE)).index_fill_(0, pages.to(storage.device), 0)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._k_THD.device

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return 2 * self._k_THD.numel() * self._k_THD.element_size()


def read_rows(storage_T: Tensor, pages_BP: Tensor, tokens: int, first_place: int | None) -> Tensor:
    """Read paged storage `(places, ...)`: `(b, tokens, ...)`, see `KvLayer.read`."""
    if first_place is not None:
        return storage_T[first_place : first_place + tokens].unsqueeze(0)
    # One contiguous index lets torch copy whole pages; with a strided table it gathers elements.
    pages = storage_T.unflatten(0, (-1, PAGE_SIZE))[pages_BP.flatten()]
    return pages.unflatten(0, pages_BP.shape).flatten(1, 2)[:, :tokens]
