"""Text of a growing list of token ids, piece by piece and never half a character.

A token may hold a fraction of a UTF-8 character, and some decoders look at the
neighbours of a token (a leading space, a run of raw bytes). So the text of a new token
is the difference of two decodings that start a few tokens earlier, and a piece that
ends in U+FFFD, the mark of an unfinished character, is held back until the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class TokenStream:
    """Decodes token ids as they arrive.

    Args:
        decode: maps a list of token ids to text.
        context_ids: tokens that came before (the end of the prompt); they give the decoder
            its neighbourhood and are not part of the text.
    """

    CONTEXT_TOKENS = 6
    """How many tokens of a prompt are kept: a character is at most 4 bytes, so 4 tokens."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._ids = list(context_ids)[-self.CONTEXT_TOKENS :]
        # The text of ids[:_shown] has been returned; decoding starts at _start < _shown.
        self._start = 0
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        """Add one token and return the text that became certain, often an empty string."""
        self._ids.append(token_id)
        piece = self._pending()
        if piece.endswith(REPLACEMENT) or not piece:
            return ""
        self._advance()
        return piece

    def flush(self) -> str:
        """Return what is held back, unfinished characters included; use it after the last token."""
        piece = self._pending()
        self._advance()
        return piece

    def _pending(self) -> str:
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _advance(self) -> None:
        del self._ids[: self._shown]
        self._start, self._shown = 0, len(self._ids)
