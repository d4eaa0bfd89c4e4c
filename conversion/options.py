"""The options of a conversion job: defaults, checks, and what a resumed job may change.

A `ConversionOptions` is the whole job as data, together with the source files
and the plan: the output is a function of the three (docs/conversion.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from exllamav3.codec.params import Codebook
from exllamav3.errors import ConversionError
from exllamav3.topology import SCALES
from exllamav3.util.rates import INTEGER_BITS

CODEBOOKS = tuple(codebook.value for codebook in Codebook)
UNQUANTIZED_BITS = 16
"""As a rate: keep the weights as they are."""

_KINDS: dict[str, Any] = {
    "str": str,
    "str | None": (str, type(None)),
    "int": int,
    "float": (int, float),
    "bool": bool,
    "tuple[str, ...]": tuple,
}
"""What a field may hold, by its annotation; a truth value is no number."""

OVERRIDABLE = (
    "in_dir",
    "out_dir",
    "shard_size",
    "mtp_bits",
    "checkpoint_interval",
    "devices",
    "codebook",
    "out_scales",
    "verbose",
)
"""Options that may differ from the stored ones when a job is resumed."""

_FLAGS = {
    "in_dir": "-i",
    "out_dir": "-o",
    "work_dir": "-w",
    "bits": "-b",
    "head_bits": "-hb",
    "mtp_bits": "-mb",
    "vision_bits": "-vb",
    "shard_size": "-ss",
    "cal_rows": "-cr",
    "cal_cols": "-cc",
    "cal_data": "-cd",
    "checkpoint_interval": "-cpi",
    "devices": "-d",
    "codebook": "-cb",
    "out_scales": "--out_scales",
    "seed": "--seed",
    "verbose": "-v",
}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Everything a user can say about a job, except the QKV topology plan.

    in_dir, work_dir, out_dir: folders: source checkpoint, job state, result
    bits: mean bits per weight of the decoder's linears, 1 to 8
    head_bits, mtp_bits: rate of lm_head and of the MTP linears, 1..8 or 16 (unquantized)
    vision_bits: 16; the vision tower is copied
    shard_size: largest output shard in MiB
    cal_rows, cal_cols: calibration windows, and tokens of each
    cal_data: text or safetensors file to calibrate with; None is the bundled text
    checkpoint_interval: least seconds between checkpoints of the calibration state
    devices: torch device names, the first is the primary one
    """

    in_dir: str
    work_dir: str
    out_dir: str
    bits: float
    head_bits: int = 6
    mtp_bits: int = 4
    vision_bits: int = 16
    shard_size: int = 8192
    cal_rows: int = 128
    cal_cols: int = 1024
    cal_data: str | None = None
    checkpoint_interval: float = 120
    devices: tuple[str, ...] = ("cpu",)
    codebook: str = "mul1"
    out_scales: str = "always"
    seed: int = 0
    verbose: bool = False

    def __post_init__(self) -> None:
        """Check every value on its own.

        Raises:
            ConversionError: a value is outside its domain; nothing was read or written.
        """
        for problem in _problems(self):
            raise ConversionError(problem)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as stored in the job folder."""
        values = asdict(self)
        values["devices"] = list(self.devices)
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> ConversionOptions:
        """Read back what `to_json` wrote.

        Raises:
            ConversionError: a key is missing or unknown: another version wrote the job; or a value
                is none that an option can have.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            odd = ", ".join(sorted(set(values) ^ known))
            raise ConversionError(
                f"{where}: the stored options do not match this version (differing keys: {odd}); "
                f"start a new job in an empty folder"
            )
        devices = values["devices"]
        if not isinstance(devices, list) or not all(isinstance(name, str) for name in devices):
            raise ConversionError(
                f"{where}: devices is {devices!r}, expected a list of names; the file is damaged"
            )
        try:
            return cls(**{**values, "devices": tuple(devices)})
        except ConversionError as error:
            raise ConversionError(f"{where}: a stored option is damaged: {error}") from error


def _problems(options: ConversionOptions) -> list[str]:
    """Sentences about values outside their domain, the most basic first."""
    problems = []
    for field in fields(options):
        value = getattr(options, field.name)
        if not isinstance(value, _KINDS[str(field.type)]) or (
            isinstance(value, bool) and field.type != "bool"
        ):
            expected = str(field.type).replace(" | None", "")
            flag = _FLAGS[field.name]
            problems.append(f"{flag} ({field.name}) is {value!r}, expected a value of {expected}")
    if problems:
        return problems

    def expect(good: bool, name: str, what: str) -> None:
        if not good:
            found = getattr(options, name)
            problems.append(f"{_FLAGS[name]} ({name}) is {found!r}, expected {what}")

    for name in ("in_dir", "work_dir", "out_dir"):
        value = getattr(options, name)
        expect(value != "", name, "a folder")
        # Files in other folders cannot be opened by the safetensors library.
        expect(_is_unicode(value), name, "a path in UTF-8; rename the folder")
    lowest, highest = INTEGER_BITS[0], INTEGER_BITS[-1]
    expect(lowest <= options.bits <= highest, "bits", "a number from 1 to 8 (mean bits per weight)")
    for name in ("head_bits", "mtp_bits"):
        expect(_is_rate(getattr(options, name)), name, "an integer from 1 to 8, or 16")
    expect(
        options.vision_bits == UNQUANTIZED_BITS,
        "vision_bits",
        "16: the vision tower is copied as it is, quantizing it is not supported yet",
    )
    for name in ("shard_size", "cal_rows", "cal_cols"):
        expect(getattr(options, name) >= 1, name, "a positive integer")
    expect(0 <= options.checkpoint_interval < math.inf, "checkpoint_interval", "seconds, 0 or more")
    expect(options.codebook in CODEBOOKS, "codebook", f"one of {', '.join(CODEBOOKS)}")
    expect(options.out_scales in SCALES, "out_scales", f"one of {', '.join(SCALES)}")
    expect(options.seed >= 0, "seed", "an integer, 0 or more")
    expect(len(options.devices) > 0, "devices", "at least one device")
    accelerators = [name for name in options.devices if name != "cpu"]
    expect(
        len(set(accelerators)) == len(accelerators)
        and len({n == "cpu" for n in options.devices}) < 2,
        "devices",
        "different GPUs, or only the CPU",
    )
    return problems


def _is_unicode(path: object) -> bool:
    return "\x00" not in str(path) and not any("\ud800" <= c <= "\udfff" for c in str(path))


def _is_rate(bits: int) -> bool:
    return bits in (*INTEGER_BITS, UNQUANTIZED_BITS)


def resume_options(
    stored: ConversionOptions, given: Mapping[str, Any], where: str
) -> tuple[ConversionOptions, tuple[str, ...]]:
    """Options of a resumed job: the stored ones with what was given explicitly on top.

    Args:
        stored: the options the job was created with.
        given: only what the user stated this time.
        where: the job folder, for messages.

    Returns:
        The options, and the names of those that changed.

    Raises:
        ConversionError: something that shapes finished work would change; lists all of it.
    """
    changed = {
        name: value
        for name, value in given.items()
        if name != "work_dir" and value != getattr(stored, name)
    }
    fixed = [name for name in changed if name not in OVERRIDABLE]
    if fixed:
        lines = "; ".join(
            f"{_FLAGS[name]} ({name}) is stored as {getattr(stored, name)!r}, given as "
            f"{changed[name]!r}"
            for name in sorted(fixed)
        )
        raise ConversionError(
            f"{where}: a resumed job keeps its options, but {lines}. Leave these options out to "
            f"continue, or start a new job in an empty folder"
        )
    work_dir = given.get("work_dir", stored.work_dir)
    return replace(stored, **changed, work_dir=work_dir), tuple(sorted(changed))
