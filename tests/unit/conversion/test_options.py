"""Options: defaults, domains, and what a resumed job may change."""

from __future__ import annotations

import json

import pytest
from exllamav3.conversion.options import OVERRIDABLE, ConversionOptions, resume_options

from exllamav3.errors import ConversionError


def options(**values: object) -> ConversionOptions:
    return ConversionOptions(
        **{"in_dir": "i", "work_dir": "w", "out_dir": "o", "bits": 4.0, **values}
    )


def test_defaults_are_those_of_the_documentation():
    made = options()
    assert (made.codebook, made.out_scales) == ("mul1", "always")
    assert (made.head_bits, made.mtp_bits, made.vision_bits) == (6, 4, 16)
    assert (made.cal_rows, made.cal_cols, made.shard_size) == (128, 1024, 8192)
    assert (made.checkpoint_interval, made.seed) == (120, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bits", 0.5, "-b .bits. is 0.5"),
        ("bits", 8.5, "1 to 8"),
        ("bits", float("nan"), "-b"),
        ("head_bits", 9, "-hb .head_bits. is 9, expected an integer from 1 to 8, or 16"),
        ("head_bits", 0, "-hb"),
        ("mtp_bits", 12, "-mb"),
        ("vision_bits", 6, "-vb .vision_bits. is 6, expected 16: the vision tower is copied"),
        ("vision_bits", 0, "-vb"),
        ("shard_size", 0, "-ss"),
        ("cal_rows", 0, "-cr"),
        ("cal_cols", -1, "-cc"),
        ("checkpoint_interval", -1, "-cpi"),
        ("codebook", "3INST", "-cb"),
        ("out_scales", "yaqa", "--out_scales"),
        ("seed", -1, "--seed"),
        ("devices", (), "-d"),
        ("devices", ("cuda:0", "cuda:0"), "-d"),
        ("devices", ("cpu", "cuda:0"), "-d"),
        ("in_dir", "", "-i"),
        ("in_dir", None, "-i .in_dir. is None, expected a value of str"),
        ("bits", "4", "-b .bits. is '4', expected a value of float"),
        ("bits", True, "-b .bits. is True"),
        ("cal_rows", 6.5, "-cr .cal_rows. is 6.5, expected a value of int"),
        ("head_bits", True, "-hb"),
        ("seed", "1", "--seed"),
        ("devices", ["cpu"], "-d"),
        ("verbose", 1, "-v"),
        ("checkpoint_interval", float("inf"), "-cpi"),
    ],
)
def test_a_value_outside_its_domain_is_refused_by_its_flag(name, value, message):
    with pytest.raises(ConversionError, match=message):
        options(**{name: value})


@pytest.mark.parametrize("bits", [1, 3.5, 8])
def test_any_mean_rate_from_1_to_8_is_accepted(bits):
    assert options(bits=bits).bits == bits


def test_stored_options_are_read_back_unchanged():
    made = options(devices=("cuda:0", "cuda:1"), cal_data="rows.safetensors", seed=7)
    stored = json.loads(json.dumps(made.to_json()))
    assert ConversionOptions.from_json(stored, "job.json") == made


def test_stored_options_of_another_version_are_refused():
    stored = options().to_json()
    del stored["seed"]
    with pytest.raises(ConversionError, match=r"job.json: .*differing keys: seed"):
        ConversionOptions.from_json(stored, "job.json")


def test_resuming_without_options_keeps_all_of_them():
    stored = options(codebook="mcg", out_scales="never", bits=3.0)
    assert resume_options(stored, {}, "w") == (stored, ())


def test_an_option_stated_with_its_stored_value_changes_nothing():
    stored = options(bits=3.0)
    assert resume_options(stored, {"bits": 3.0, "codebook": "mul1"}, "w") == (stored, ())


def test_a_moved_work_folder_is_not_a_contradiction():
    made, changed = resume_options(options(), {"work_dir": "elsewhere"}, "elsewhere")
    assert made.work_dir == "elsewhere"
    assert changed == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("in_dir", "moved"),
        ("out_dir", "moved"),
        ("shard_size", 1),
        ("mtp_bits", 16),
        ("checkpoint_interval", 0),
        ("devices", ("cuda:0",)),
        ("codebook", "mcg"),
        ("out_scales", "never"),
        ("verbose", True),
    ],
)
def test_an_overridable_option_takes_the_new_value(name, value):
    assert name in OVERRIDABLE
    made, changed = resume_options(options(), {name: value}, "w")
    assert getattr(made, name) == value
    assert changed == (name,)


def test_contradictions_are_refused_together():
    given = {"bits": 3.0, "cal_rows": 5, "seed": 1, "codebook": "mcg"}
    with pytest.raises(ConversionError) as error:
        resume_options(options(), given, "w")
    text = str(error.value)
    assert "-b (bits) is stored as 4.0, given as 3.0" in text
    assert "-cr (cal_rows)" in text
    assert "--seed (seed)" in text
    assert "codebook" not in text


@pytest.mark.parametrize(("name", "value"), [("bits", "x"), ("devices", 3), ("devices", [1])])
def test_a_damaged_stored_option_is_named_with_its_file(name, value):
    with pytest.raises(
        ConversionError, match=rf"^job.json: .*{name}.* is .*damaged|damaged: .*{name}"
    ):
        ConversionOptions.from_json(options().to_json() | {name: value}, "job.json")
