"""Which token ids open, close and pad a text, read from the JSON files beside a model.

Three files may speak: `tokenizer_config.json` (names of tokens; null means that the
model has none), `generation_config.json` (ids at which generation stops) and
`config.json` (default ids). A key that is present in `tokenizer_config.json` wins over
`config.json` even where its value is null: many configurations keep a numeric
`bos_token_id` for a model that was trained without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exllamav3.errors import FormatError
from exllamav3.util.json_text import parse_json


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the special tokens; None where the model has no such token.

    `stop_ids` are all the ids at which a generation ends, `eos_id` first.
    """

    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None
    stop_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or `{}` where the file does not exist.

    Raises:
        FormatError: the file is not a JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON ({error}); restore the file") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: found {type(value).__name__}, expected a JSON object")
    return value


def read_special_tokens(
    directory: Path,
    tokenizer_config: Mapping[str, Any],
    token_to_id: Callable[[str], int | None],
) -> SpecialTokens:
    """Collect the special ids of the model in `directory`.

    Args:
        directory: model directory.
        tokenizer_config: content of its `tokenizer_config.json`.
        token_to_id: looks a token up in the vocabulary.

    Raises:
        FormatError: a named token is not in the vocabulary, or an id is not an integer.
    """
    config = read_json(directory / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**text_config, **{k: v for k, v in config.items() if v is not None}}
    generation = read_json(directory / "generation_config.json")

    def one(name: str) -> int | None:
        where = directory / "tokenizer_config.json"
        if f"{name}_token" in tokenizer_config:
            return _named_id(tokenizer_config[f"{name}_token"], name, where, token_to_id)
        ids = _id_list(config.get(f"{name}_token_id"), f"{name}_token_id", directory)
        return ids[0] if ids else None

    eos = one("eos")
    stop = [] if eos is None else [eos]
    for source in (generation, config):
        for token_id in _id_list(source.get("eos_token_id"), "eos_token_id", directory):
            if token_id not in stop:
                stop.append(token_id)
    return SpecialTokens(
        bos_id=one("bos"),
        eos_id=stop[0] if stop else None,
        pad_id=one("pad"),
        unk_id=one("unk"),
        stop_ids=tuple(stop),
    )


def _named_id(
    value: object, name: str, where: Path, token_to_id: Callable[[str], int | None]
) -> int | None:
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    if not isinstance(content, str):
        raise FormatError(f"{where}: {name}_token is {value!r}, expected a string or null")
    token_id = token_to_id(content)
    if token_id is None:
        raise FormatError(
            f"{where}: {name}_token {content!r} is not in the vocabulary of tokenizer.json; "
            f"the two files belong to different models"
        )
    return token_id


def _id_list(value: object, key: str, directory: Path) -> list[int]:
    if value is None:
        return []
    ids: list[int] = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise FormatError(
                f"{directory}: {key} is {value!r}, expected an integer, a list of integers or null"
            )
        ids.append(entry)
    return ids
