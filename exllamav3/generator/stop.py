"""Stop strings over streamed text: nothing that may be the start of one is let out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exllamav3.errors import FormatError


def split_stop_conditions(conditions: Sequence[str | int]) -> tuple[tuple[str, ...], set[int]]:
    """Sort stop conditions into strings and token ids.

    Raises:
        FormatError: an entry is neither a non-empty string nor an integer, or it is all one string.
    """
    if isinstance(conditions, str):  # a sequence of strings too: each letter would stop
        raise FormatError(
            f"stop_conditions is the string {conditions!r}, expected a list; write [{conditions!r}]"
        )
    strings: list[str] = []
    ids: set[int] = set()
    for index, condition in enumerate(conditions):
        if isinstance(condition, str) and condition:
            strings.append(condition)
        elif isinstance(condition, int) and not isinstance(condition, bool):
            ids.add(condition)
        else:
            raise FormatError(
                f"stop_conditions[{index}] is {condition!r}, expected a non-empty string or a "
                f"token id (leave out tokens that the model does not have)"
            )
    return tuple(strings), ids


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found: `string`, and the `text` before it that was still held back."""

    text: str
    string: str


class StopFilter:
    """Passes text on up to the first stop string.

    Args:
        strings: the stop strings; where two begin at the same place the longer one counts.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._held = ""

    def push(self, piece: str) -> str | StopMatch:
        """Add text; return what may go out, or the match that ends the stream."""
        text = self._held + piece
        places = [(text.find(string), string) for string in self._strings if string in text]
        if places:
            # min() keeps the first of equals, which the sorting made the longest.
            place, string = min(places, key=lambda entry: entry[0])
            return StopMatch(text[:place], string)
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what is held back; use it when the text has ended without a match."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
