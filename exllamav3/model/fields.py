"""Typed reading of one JSON object of a configuration file.

A `null` counts as absent, as it does for the libraries that write these files. Nothing is
converted: `"4"` is not 4 and `true` is not 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exllamav3.errors import FormatError
from exllamav3.util.json_text import parse_json


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. FormatError when it does not, or does not exist."""
    if not path.is_file():
        raise FormatError(f"{path}: missing; a model folder needs it")
    try:
        obj = parse_json(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not JSON ({error})") from error
    if not isinstance(obj, dict):
        raise FormatError(f"{path}: is a JSON {type(obj).__name__}, expected an object")
    return obj


class Fields:
    """Values of one JSON object; every method raises FormatError on a wrong type.

    Methods take a `default`; without one the key is required. `where` is file and JSON path.
    """

    def __init__(self, obj: Mapping[str, Any], where: str) -> None:
        self.obj, self.where = obj, where

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.obj.get(key) is not None

    def get(self, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        """The value, which must be one of `kinds`, or None where it is absent."""
        value = self.obj.get(key)
        # bool is a subclass of int in Python, in JSON it is another type.
        fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is None or fits:
            return value
        raise FormatError(f"{self.where}.{key}: is {value!r}, expected {expected}")

    def _or_default(self, key: str, value: Any, default: Any, expected: str) -> Any:
        if value is not None:
            return value
        if default is None:
            raise FormatError(f"{self.where}.{key}: missing, expected {expected}")
        return default

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number, at least `minimum`."""
        expected = f"a whole number of at least {minimum}"
        value: int = self._or_default(key, self.get(key, (int,), expected), default, expected)
        if value < minimum:
            raise FormatError(f"{self.where}.{key}: is {value}, expected {expected}")
        return value

    def number(self, key: str, default: float | None = None, above: float | None = None) -> float:
        """A finite number, greater than `above`."""
        expected = "a number" if above is None else f"a number greater than {above:g}"
        value = self._or_default(key, self.get(key, (int, float), expected), default, expected)
        # Python reads NaN, Infinity and integers of any length out of a JSON file.
        if not -sys.float_info.max <= value <= sys.float_info.max or (
            above is not None and not value > above
        ):
            raise FormatError(f"{self.where}.{key}: is {value!r}, expected {expected}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self.get(key, (bool,), "true or false")
        return bool(self._or_default(key, value, default, "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._or_default(key, self.get(key, (str,), "a string"), default, "a string"))

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, None where it is absent."""
        value = self.get(key, (list,), "a list of strings")
        if value is None:
            return None
        if not all(isinstance(item, str) for item in value):
            raise FormatError(f"{self.where}.{key}: is {value!r}, expected a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where it is absent."""
        value = self.get(key, (int, list), "a token id or a list of them")
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise FormatError(f"{self.where}.{key}: is {value!r}, expected token ids")
        return tuple(items)

    def child(self, key: str) -> Fields | None:
        """The object under `key`, None where it is absent."""
        value = self.get(key, (dict,), "an object")
        return None if value is None else Fields(value, f"{self.where}.{key}")
