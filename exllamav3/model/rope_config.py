"""Rotary settings out of a configuration, in its newer and its older spelling.

Newer: one object `rope_parameters`. Older: `rope_theta`, `partial_rotary_factor` and
`rope_scaling` at the top level. The older keys count only for what the newer does not state; where
both state something, they must agree.
"""

from __future__ import annotations

import math
from typing import Any

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.fields import Fields
from exllamav3.modules.rope import RopeSettings

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0


def read_rope(text: Fields, head_dim: int, partial_default: float = 1.0) -> RopeSettings:
    """Read the rotary settings of a text decoder.

    Args:
        text: settings of the decoder.
        head_dim: lanes of one head.
        partial_default: share of the lanes that turn, where the configuration is silent.

    Raises:
        FormatError: a contradiction, a missing or a wrong value.
        UnsupportedError: a rope type other than those of `ROPE_TYPES`.
    """
    merged = _merge(text)
    rope_type = merged.text("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedError(
            f"{merged.where}.rope_type: {rope_type!r} is not implemented, only "
            f"{', '.join(ROPE_TYPES)}; running without it would give wrong results"
        )
    partial = merged.number("partial_rotary_factor", partial_default)
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise FormatError(
            f"{merged.where}.partial_rotary_factor: {partial} of head_dim {head_dim} is "
            f"{rotary_dim} lanes, expected an even number from 2 to {head_dim}"
        )
    common: dict[str, Any] = {
        "theta": merged.number("rope_theta", DEFAULT_THETA, above=1),
        "rotary_dim": rotary_dim,
        "rope_type": rope_type,
    }
    if rope_type == "default":
        return RopeSettings(**common)
    if rope_type == "linear":
        return RopeSettings(**common, factor=merged.number("factor", above=0))
    original = merged.integer(
        "original_max_position_embeddings",
        text.integer("original_max_position_embeddings", text.integer("max_position_embeddings")),
    )
    if rope_type == "llama3":
        low = merged.number("low_freq_factor", above=0)
        return RopeSettings(
            **common,
            factor=merged.number("factor", above=0),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=merged.number("high_freq_factor", above=low),
        )
    factor = merged.number(
        "factor", text.integer("max_position_embeddings", original) / original, above=0
    )
    return RopeSettings(
        **common,
        factor=factor,
        original_max_positions=original,
        beta_fast=merged.number("beta_fast", 32.0, above=0),
        beta_slow=merged.number("beta_slow", 1.0, above=0),
        truncate=merged.flag("truncate", True),
        attention_factor=_yarn_attention_factor(merged, factor),
    )


def _merge(text: Fields) -> Fields:
    """One object with the newer keys, filled up from the older ones."""
    newer = text.child("rope_parameters")
    older = _older(text)
    if newer is None:
        return Fields(older, f"{text.where} (rope_theta, rope_scaling)")
    merged = _one_type_key(newer)
    for key, value in older.items():
        if merged.setdefault(key, value) != value:
            raise FormatError(
                f"{newer.where}.{key}: is {merged[key]!r}, but the older keys of the same file "
                f"say {value!r}; remove one of the two"
            )
    return Fields(merged, newer.where)


def _older(text: Fields) -> dict[str, Any]:
    found = {
        key: text.number(key) for key in ("rope_theta", "partial_rotary_factor") if text.has(key)
    }
    scaling = text.child("rope_scaling")
    if scaling is not None:
        for key, value in _one_type_key(scaling).items():
            if found.setdefault(key, value) != value:
                raise FormatError(
                    f"{scaling.where}.{key}: is {value!r}, but {text.where}.{key} is "
                    f"{found[key]!r}; remove one of the two"
                )
    return found


def _one_type_key(fields: Fields) -> dict[str, Any]:
    """The object without nulls, its type under `rope_type` (older files say `type`)."""
    obj = {key: value for key, value in fields.obj.items() if value is not None}
    for key, value in obj.items():
        if isinstance(value, dict):
            raise UnsupportedError(
                f"{fields.where}.{key}: rotary settings for each kind of layer are not implemented"
            )
    older = obj.pop("type", None)
    if older is not None and obj.setdefault("rope_type", older) != older:
        raise FormatError(
            f"{fields.where}: type is {older!r} and rope_type is {obj['rope_type']!r}; remove one"
        )
    return obj


def _yarn_attention_factor(merged: Fields, factor: float) -> float:
    """Stated, or derived from the extension factor (YaRN, section 3.4; `mscale` from DeepSeek)."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if merged.has("attention_factor"):
        return merged.number("attention_factor")
    mscale, over = merged.number("mscale", 0.0), merged.number("mscale_all_dim", 0.0)
    return scale(mscale) / scale(over) if mscale and over else scale(1.0)
