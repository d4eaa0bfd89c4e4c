"""Text to token ids and back, over the `tokenizers` library."""

from exllamav3.tokenizer.stream import TokenStream
from exllamav3.tokenizer.tokenizer import Tokenizer

__all__ = ["TokenStream", "Tokenizer"]
