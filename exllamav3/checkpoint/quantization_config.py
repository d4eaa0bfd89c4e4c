"""The `quantization_config` section of config.json and quantization_config.json.

Nothing in it is needed to decode: rate and codebook come from the tensors. It records how the
file was made, and carries the QKV topology declaration. Source: docs/format.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError, TopologyError, UnsupportedError
from exllamav3.topology import METADATA_KEY, SCALES

QUANT_METHOD = "exl3"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Size of the calibration set: `rows` sequences of `cols` tokens."""

    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """How a checkpoint was quantized.

    bits: average bits per weight of the budgeted linears. head_bits, mtp_bits, vision_bits: of
    the head, the MTP layer and the vision tower; 16 means unquantized, None not stated.
    qkv_topology: the raw declaration, None where there is none (every block is split).
    original: the `quantization_config` of the source, if it had one.
    extra: keys this version does not know, kept so that they survive a round trip.
    """

    version: str
    bits: float
    head_bits: float | None = None
    calibration: Calibration | None = None
    out_scales: str | None = None
    codebook: Codebook | None = None
    vision_bits: float | None = None
    mtp_bits: float | None = None
    qkv_topology: Any = None
    original: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_obj(self) -> dict[str, Any]:
        """The JSON object, keys in the order in which the established library writes them."""
        obj: dict[str, Any] = {
            "quant_method": QUANT_METHOD,
            "version": self.version,
            "bits": self.bits,
        }
        calibration = self.calibration
        optional = {
            "head_bits": self.head_bits,
            "calibration": calibration and {"rows": calibration.rows, "cols": calibration.cols},
            "out_scales": self.out_scales,
            "codebook": self.codebook and self.codebook.value,
            "vision_bits": self.vision_bits,
            "mtp_bits": self.mtp_bits,
            METADATA_KEY: self.qkv_topology,
            "original_quantization_config": self.original,
        }
        obj.update({key: value for key, value in optional.items() if value is not None})
        obj.update(self.extra)
        return obj


def parse_quantization_config(obj: Any, where: str) -> QuantizationConfig:
    """Parse the section.

    Args:
        obj: the JSON value.
        where: file and JSON path, for messages.

    Raises:
        UnsupportedError: the checkpoint was quantized by another method.
        FormatError: a key is missing or has the wrong type, or an `exl3_...` key is unknown.
        TopologyError: the declaration is null, which must not pass for an absent one.
    """
    if not isinstance(obj, dict):
        raise FormatError(f"{where}: is a {type(obj).__name__}, expected an object")
    method = obj.get("quant_method")
    if method != QUANT_METHOD:
        raise UnsupportedError(
            f"{where}: quant_method is {method!r}; only unquantized and {QUANT_METHOD!r} "
            f"checkpoints are read, start from the BF16 model this one was made from"
        )
    left = dict(obj)
    left.pop("quant_method")
    if METADATA_KEY in left and left[METADATA_KEY] is None:
        raise TopologyError(
            f"{where}.{METADATA_KEY}: is null, expected an object; restore the declaration from "
            f"quantization_config.json or a shard header, or remove the key if every block is split"
        )
    take = _Taker(left, where)
    config = QuantizationConfig(
        version=take.text("version") or "",
        bits=_required(take.number("bits"), "bits", where),
        head_bits=take.number("head_bits"),
        calibration=_parse_calibration(left.pop("calibration", None), f"{where}.calibration"),
        out_scales=take.text("out_scales", SCALES),
        codebook=_parse_codebook(take.text("codebook", tuple(c.value for c in Codebook))),
        vision_bits=take.number("vision_bits"),
        mtp_bits=take.number("mtp_bits"),
        qkv_topology=left.pop(METADATA_KEY, None),
        original=take.object("original_quantization_config"),
        extra=left,
    )
    for key in left:
        if key.startswith("exl3_"):
            raise FormatError(
                f"{where}.{key}: unknown; it may change how tensors must be read, so this version "
                f"does not go on without it (known: {METADATA_KEY})"
            )
    return config


def _required(value: float | None, key: str, where: str) -> float:
    if value is None:
        raise FormatError(f"{where}.{key}: missing, expected a number")
    return value


def _parse_codebook(name: str | None) -> Codebook | None:
    return None if name is None else Codebook.from_name(name)


def _parse_calibration(obj: Any, where: str) -> Calibration | None:
    if obj is None:
        return None
    if not isinstance(obj, dict) or set(obj) != {"rows", "cols"}:
        raise FormatError(f"{where}: is {obj!r}, expected an object of rows and cols")
    for key, value in obj.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"{where}.{key}: is {value!r}, expected a count")
    return Calibration(obj["rows"], obj["cols"])


class _Taker:
    """Removes typed values from an object; a null counts as absent."""

    def __init__(self, left: dict[str, Any], where: str) -> None:
        self._left, self._where = left, where

    def _take(self, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        value = self._left.pop(key, None)
        if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
            return value
        raise FormatError(f"{self._where}.{key}: is {value!r}, expected {expected}")

    def number(self, key: str) -> float | None:
        value: float | None = self._take(key, (int, float), "a number")
        if value is not None and not abs(value) <= sys.float_info.max:  # NaN, or beyond a float
            raise FormatError(f"{self._where}.{key}: is {value!r}, expected a number")
        return value

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str | None:
        value: str | None = self._take(key, (str,), "a string")
        if value is not None and choices and value not in choices:
            raise FormatError(
                f"{self._where}.{key}: is {value!r}, expected one of {', '.join(choices)}"
            )
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._take(key, (dict,), "an object")
        return value
