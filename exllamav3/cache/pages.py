"""Pages of the cache and who holds them.

The cache is cut into pages of 256 tokens. A sequence holds as many whole pages as it may ever
need, in any order, so memory is never fragmented and sequences of any length share one cache.
"""

from __future__ import annotations

from bisect import insort

from exllamav3.errors import FormatError

PAGE_SIZE = 256
"""Tokens of a page."""


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """Hands out page numbers `0 .. pages - 1`, preferably consecutive ones.

    Consecutive pages let a lone sequence be read as one view, without gathering.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))  # ascending

    @property
    def free(self) -> int:
        """Number of pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` pages out of the pool.

        Raises:
            FormatError: fewer are free; the caller should have asked `free` first.
        """
        if count > self.free:
            raise FormatError(
                f"cache: {count} pages of {PAGE_SIZE} tokens asked for, {self.free} of "
                f"{self.pages} are free; release sequences or make the cache larger"
            )
        start = self._first_run(count)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the pool."""
        for page in pages:
            insort(self._free, page)

    def _first_run(self, count: int) -> int:
        """Index in the free list where `count` consecutive pages begin, 0 if there is no such."""
        for start in range(len(self._free) - count + 1):
            if self._free[start + count - 1] - self._free[start] == count - 1:
                return start
        return 0
