"""What a model remembers of the sequences it has seen: keys, values and recurrent states."""

from exllamav3.cache.cache import Cache, Sequence
from exllamav3.cache.pages import PAGE_SIZE
from exllamav3.cache.placement import FixedBatch, page_table

__all__ = ["PAGE_SIZE", "Cache", "FixedBatch", "Sequence", "page_table"]
