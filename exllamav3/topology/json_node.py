"""JSON values that know where they stand, so that every error can say so.

`read_json` is stricter than `json.loads`: duplicate keys, NaN and infinities,
bytes that are not UTF-8, absurdly long numbers and documents nested too deeply
are refused, all as TopologyError. `Node` reads a value as exactly one type and
converts nothing: `true` is not 1, `4.0` is not 4.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from exllamav3.errors import TopologyError

MAX_NUMBER_CHARACTERS = 64
"""Longest number a document may contain; none of ours has more than a dozen digits."""
MAX_SHOWN_CHARACTERS = 120
MAX_PATH_CHARACTERS = 300
_PLAIN_KEY = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
"""Keys that a JSON path shows bare; others it shows quoted, cut and in brackets."""


class _Object(dict[str, object]):
    """A parsed object that remembers the first key that occurred twice in it."""

    duplicate: str | None = None


def _object_from_pairs(pairs: list[tuple[str, object]]) -> _Object:
    result = _Object(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                result.duplicate = key
                break
            seen.add(key)
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON value")


def _bounded(text: str) -> str:
    if len(text) > MAX_NUMBER_CHARACTERS:
        limit = MAX_NUMBER_CHARACTERS
        raise ValueError(f"a number has {len(text)} characters, at most {limit} are read")
    return text


def _bounded_int(text: str) -> int:
    return int(_bounded(text))


def _bounded_float(text: str) -> float:
    return float(_bounded(text))


def show(value: object) -> str:
    """Describe a value in an error message: short, printable, whatever the value is."""
    if isinstance(value, dict):
        return f"an object with {len(value)} keys"
    if isinstance(value, list):
        return f"an array of {len(value)} values"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        text = json.dumps(value[:MAX_SHOWN_CHARACTERS])
        return text if len(value) <= MAX_SHOWN_CHARACTERS else f'{text[:-1]}..."'
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return f"a Python {type(value).__name__}"


def show_list(values: Iterable[object], limit: int | None = None) -> str:
    """Join values for a message: `"a", "b", 3`; those past `limit` are only counted."""
    values = list(values)
    shown = ", ".join(show(value) for value in values[:limit])
    hidden = 0 if limit is None else max(0, len(values) - limit)
    return (shown + (f" and {hidden} more" if hidden else "")) or "nothing"


@dataclass(frozen=True, slots=True)
class Node:
    """One JSON value and its place.

    value: what the parser returned; where: file name; path: JSON path in it, empty
    for the root; subject: what the value is about, such as a layer.
    """

    value: object
    where: str
    path: str = ""
    subject: str = ""

    def error(self, problem: str, advice: str = "") -> TopologyError:
        """Make (not raise) the error of this value: place, subject, problem, what to do."""
        path = self.path
        if len(path) > MAX_PATH_CHARACTERS:
            path = f"...{path[-MAX_PATH_CHARACTERS:]}"
        place = f"{self.where}, {path}" if path else self.where
        parts = [place, self.subject, problem] if self.subject else [place, problem]
        return TopologyError(": ".join(parts) + (f". {advice}" if advice else ""))

    def about(self, subject: str) -> Node:
        """The same value, with `subject` in its errors and in those of its children."""
        return replace(self, subject=subject)

    def _type_error(self, expected: str, advice: str) -> TopologyError:
        name = self.path.rpartition(".")[2] or "the document"
        if name.endswith('"]'):  # a key with dots in it; the path shows it whole
            name = "the value"
        return self.error(f"{name} is {show(self.value)}, expected {expected}", advice)

    def _child(self, key: str) -> Node:
        assert isinstance(self.value, dict)
        step = key if _PLAIN_KEY.fullmatch(key) else f"[{show(key)}]"
        path = f"{self.path}.{step}" if self.path and step == key else f"{self.path}{step}"
        return replace(self, value=self.value[key], path=path)

    def mapping(self, advice: str = "") -> dict[str, object]:
        """Read the value as an object with string keys, none of them given twice."""
        if not isinstance(self.value, dict):
            raise self._type_error("an object", advice)
        for key in self.value:
            if not isinstance(key, str):
                raise self.error(f"key {show(key)} is not a string")
        return self.value

    def members(
        self, required: Sequence[str], optional: Sequence[str] = (), advice: str = ""
    ) -> dict[str, Node]:
        """Read the value as an object with exactly these keys.

        Raises:
            TopologyError: not an object, or a key is unknown or missing.
        """
        present = self.mapping(advice)
        known = [*required, *optional]
        for key in present:
            if key not in known:
                close = difflib.get_close_matches(key[:MAX_SHOWN_CHARACTERS], known, n=1)
                close = [name for name in known if name.lower() == key.lower()] or close
                hint = f"; did you mean {show(close[0])}?" if close else ""
                raise self.error(
                    f"unknown key {show(key)}, expected {show_list(known)}{hint}", advice
                )
        for key in required:
            if key not in present:
                raise self.error(
                    f"key {show(key)} is missing, found {show_list(present, 9)}", advice
                )
        return {key: self._child(key) for key in known if key in present}

    def member(self, key: str) -> Node:
        """Read one key that must be there, without judging the others."""
        if key not in self.mapping():
            raise self.error(f"key {show(key)} is missing, found {show_list(self.mapping(), 9)}")
        return self._child(key)

    def array(self, advice: str = "") -> list[Node]:
        """Read the value as an array."""
        if not isinstance(self.value, list):
            raise self._type_error("an array", advice)
        return [
            replace(self, value=item, path=f"{self.path}[{index}]")
            for index, item in enumerate(self.value)
        ]

    def string(self, advice: str = "") -> str:
        """Read the value as a string that is not empty."""
        if not isinstance(self.value, str) or not self.value:
            raise self._type_error("a non-empty string", advice)
        return self.value

    def choice(self, choices: Sequence[str], advice: str = "") -> str:
        """Read the value as one of these strings."""
        if not isinstance(self.value, str) or self.value not in choices:
            raise self._type_error(f"one of {show_list(choices)}", advice)
        return self.value

    def integer(self, low: int, high: int, advice: str = "") -> int:
        """Read the value as an integer from `low` to `high`; a bool or a float is none."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._type_error(f"an integer from {low} to {high}", advice)
        return value


def _refuse_duplicate_keys(root: Node) -> None:
    """Walk a document without recursion and refuse the first object with a key given twice."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node.value, _Object):
            if node.value.duplicate is not None:
                raise node.error(
                    f"key {show(node.value.duplicate)} is given twice", "Remove one of the two."
                )
            pending.extend(reversed([node._child(key) for key in node.value]))
        elif isinstance(node.value, list):
            pending.extend(reversed(node.array()))


def read_json(text: str | bytes, where: str, *, allow_nan: bool = False) -> Node:
    """Parse a JSON document strictly.

    Args:
        text: the document; bytes must be UTF-8 without a byte order mark.
        where: name of the file, for errors.
        allow_nan: accept NaN and infinities, which some model configurations contain; as
            floats they still satisfy nothing that a `Node` can be read as.

    Raises:
        TopologyError: anything but one well-formed JSON value without duplicate keys.
    """
    root = Node(None, where)
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise root.error(
                f"byte {error.start} is not UTF-8", "Save the file as UTF-8."
            ) from error
    if text.startswith("\ufeff"):
        raise root.error("it begins with a byte order mark", "Save the file as UTF-8 without one.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object_from_pairs,
            parse_constant=float if allow_nan else _refuse_constant,
            parse_int=_bounded_int,
            parse_float=_bounded_float,
        )
    except RecursionError as error:
        raise root.error("the document is nested too deeply to be one of ours") from error
    except ValueError as error:
        raise root.error(f"not valid JSON ({error})", "Correct the file.") from error
    node = replace(root, value=value)
    _refuse_duplicate_keys(node)
    return node
