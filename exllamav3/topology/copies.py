"""The declaration is stored several times; the copies must agree with config.json."""

from __future__ import annotations

from collections.abc import Mapping

from exllamav3.topology.declaration import (
    Declaration,
    parse_declaration,
    parse_declaration_text,
)
from exllamav3.topology.json_node import Node, show
from exllamav3.topology.resolved import ResolvedTopology
from exllamav3.topology.schema import CONFIG_PATH

_ADVICE = "Copies come from the same conversion as config.json; restore the original files."


def check_copies(
    authoritative: ResolvedTopology | Declaration,
    copies: Mapping[str, object],
    *,
    required: bool = False,
) -> None:
    """Compare copies of the declaration with the authoritative one in config.json.

    Args:
        authoritative: the declaration of config.json.
        copies: every copy there is by its place (file and JSON path), as JSON text (shard
            headers) or as decoded JSON (quantization_config.json, index). A reader leaves out
            places without a copy; a producer gives None for them.
        required: the producer's stricter rule: no place without a copy, and text must be
            compact JSON with sorted keys, byte for byte.

    Raises:
        TopologyError: a copy is malformed or says something else; names the first difference.
    """
    expected = authoritative.to_obj()
    for where, copy in copies.items():
        node = Node(copy, where)
        if copy is None and required:
            raise node.error(f"the copy of {CONFIG_PATH} is missing", "Write it again.")
        if isinstance(copy, str | bytes):
            declaration = parse_declaration_text(copy, where)
        else:
            declaration = parse_declaration(copy, where)
        difference = first_difference(declaration.to_obj(), expected)
        if difference is not None:
            raise node.error(f"{difference} (compared with config.json, {CONFIG_PATH})", _ADVICE)
        text = copy.decode() if isinstance(copy, bytes) else copy
        if required and isinstance(text, str) and text != _compact(authoritative):
            raise node.error(
                "the copy is not compact JSON with sorted keys", "Write it with to_compact_json()."
            )


def _compact(authoritative: ResolvedTopology | Declaration) -> str:
    return ResolvedTopology(authoritative.rows).to_compact_json()


def first_difference(found: object, expected: object, path: str = "") -> str | None:
    """Describe where two JSON values first differ, or None if they are equal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in expected:
            if key not in found:
                return f"{path}.{key} is missing".lstrip(".")
            difference = first_difference(found[key], expected[key], f"{path}.{key}".lstrip("."))
            if difference is not None:
                return difference
        extra = next((key for key in found if key not in expected), None)
        return None if extra is None else f"{path}.{extra} is superfluous".lstrip(".")
    if isinstance(found, list) and isinstance(expected, list):
        for index, (one, two) in enumerate(zip(found, expected, strict=False)):
            difference = first_difference(one, two, f"{path}[{index}]")
            if difference is not None:
                return difference
        if len(found) != len(expected):
            return f"{path} has {len(found)} entries, expected {len(expected)}"
        return None
    if type(found) is type(expected) and found == expected:
        return None
    return f"{path} is {show(found)}, expected {show(expected)}"
