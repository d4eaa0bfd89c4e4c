import json

import pytest

from exllamav3.checkpoint.quantization_config import parse_quantization_config
from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError, TopologyError, UnsupportedError

GOOD = {
    "quant_method": "exl3",
    "version": "1.6.5",
    "bits": 4.0,
    "head_bits": 6,
    "calibration": {"rows": 24, "cols": 512},
    "out_scales": "always",
    "codebook": "mcg",
    "mtp_bits": 4,
}


def parse(**changes):
    return parse_quantization_config(GOOD | changes, "config.json.quantization_config")


def test_every_key_is_read_and_written_back_in_order():
    config = parse()
    assert config.codebook is Codebook.MCG
    assert config.calibration is not None
    assert config.calibration.rows == 24
    assert json.dumps(config.to_obj()) == json.dumps(GOOD)


@pytest.mark.parametrize("path", ["config.json", "quantization_config.json"])
def test_files_of_the_established_library_parse(data_dir, path):
    for folder in (data_dir / "interop" / "quantized").iterdir():
        if not folder.is_dir():
            continue
        obj = json.loads((folder / path).read_text())
        section = obj["quantization_config"] if path == "config.json" else obj
        assert parse_quantization_config(section, path).to_obj() == section


def test_a_section_with_nothing_optional_parses():
    config = parse_quantization_config({"quant_method": "exl3", "bits": 3}, "x")
    assert config.head_bits is None
    assert config.qkv_topology is None


def test_unknown_keys_survive_a_round_trip():
    assert parse(vision_tower="x").to_obj()["vision_tower"] == "x"


def test_a_declaration_that_is_null_does_not_pass_for_an_absent_one():
    section = {"quant_method": "exl3", "version": "1", "bits": 4.0, "exl3_qkv_topology": None}
    with pytest.raises(TopologyError, match=r"config\.json\.exl3_qkv_topology: is null"):
        parse_quantization_config(section, "config.json")


def test_an_unknown_key_of_our_own_name_space_is_refused():
    with pytest.raises(FormatError, match="exl3_qkv_topolgy: unknown"):
        parse(exl3_qkv_topolgy={})


@pytest.mark.parametrize("method", ["fp8", "awq", None])
def test_another_quantization_method_is_refused_with_the_reason(method):
    with pytest.raises(UnsupportedError, match=f"quant_method is {method!r}"):
        parse(quant_method=method)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": "4"}, "bits: is '4', expected a number"),
        ({"bits": True}, "bits: is True, expected a number"),
        ({"bits": None}, "bits: missing"),
        ({"bits": float("nan")}, "bits: is nan, expected a number"),
        ({"head_bits": 10**400}, "head_bits: is 10*, expected a number"),
        ({"version": 1}, "version: is 1, expected a string"),
        ({"codebook": "mul2"}, "codebook: is 'mul2', expected one of 3inst, mcg, mul1"),
        ({"out_scales": "yes"}, "out_scales: is 'yes', expected one of"),
        ({"calibration": {"rows": 1}}, "expected an object of rows and cols"),
        ({"calibration": {"rows": -1, "cols": 2}}, "rows: is -1, expected a count"),
        ({"original_quantization_config": 3}, "expected an object"),
    ],
)
def test_a_wrong_value_is_refused(changes, message):
    with pytest.raises(FormatError, match=message):
        parse(**changes)


def test_a_section_that_is_no_object_is_refused():
    with pytest.raises(FormatError, match="is a list, expected an object"):
        parse_quantization_config([], "x")
