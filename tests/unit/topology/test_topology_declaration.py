"""Parsing of declarations: shape of the document, on its own."""

from __future__ import annotations

import json

import pytest
from topology_samples import L3, L7, L11, edited, sample_topology, text

from exllamav3.errors import TopologyError
from exllamav3.topology import (
    declaration_in_config,
    parse_declaration,
    parse_declaration_text,
)

OBJ = sample_topology().to_obj()
FUSED_ROW = 1  # rows: layer 11 (split), layer 3 (fused), layer 7 (split)
PLACE = "config.json, quantization_config.exl3_qkv_topology"


def refused(document: object) -> str:
    with pytest.raises(TopologyError) as caught:
        parse_declaration(document, "config.json", "quantization_config.exl3_qkv_topology")
    message = str(caught.value)
    assert message.startswith(PLACE)
    return message


def row_edit(index: int, **changes):
    def edit(obj):
        for key, value in changes.items():
            if value is None:
                obj["layers"][index].pop(key)
            else:
                obj["layers"][index][key] = value

    return edited(OBJ, edit)


def projection_edit(index: int | None, **changes):
    def edit(obj):
        target = (
            obj["layers"][FUSED_ROW]["projection"]
            if index is None
            else obj["layers"][0]["projections"][index]
        )
        for key, value in changes.items():
            target.pop(key) if value is None else target.update({key: value})

    return edited(OBJ, edit)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (None, "exl3_qkv_topology is null, expected an object"),
        ([], "expected an object"),
        (json.dumps(OBJ), "expected an object"),
        (1, "is 1, expected an object"),
        ({**OBJ, "schema": "exl3_qkv_topology/0"}, 'schema is "exl3_qkv_topology/0"'),
        ({**OBJ, "schema": ["exl3_qkv_topology/1"]}, "schema is an array"),
        ({**OBJ, "version": 1}, 'unknown key "version"'),
        ({"schema": OBJ["schema"]}, 'key "layers" is missing'),
        ({"layers": OBJ["layers"]}, 'key "schema" is missing'),
        ({**OBJ, "layers": {}}, "layers is an object"),
        ({**OBJ, "layers": [None]}, "layers[0] is null, expected an object"),
        ({**OBJ, 1: 2}, "key 1 is not a string"),
        (object(), "exl3_qkv_topology is a Python object, expected an object"),
        ({**OBJ, "layers": b""}, "layers is a Python bytes, expected an array"),
        ({**OBJ, "layers": ()}, "layers is a Python tuple, expected an array"),
    ],
)
def test_a_wrong_root_is_refused(document, expected):
    assert expected in refused(document)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        *[
            (row_edit(index, **{key: None}), f'key "{key}" is missing')
            for index in (0, 1)
            for key in ("layer", "variant", "components", "output_splits")
        ],
        (row_edit(0, projections=None), 'key "projections" is missing'),
        (row_edit(1, projection=None), 'key "projection" is missing'),
        (row_edit(1, projections=[]), 'unknown key "projections"'),
        (row_edit(0, projection={}), 'unknown key "projection"'),
        (row_edit(0, K=4), 'unknown key "K"'),
        (row_edit(1, K=4), 'unknown key "K"'),
        (row_edit(0, layer=11), "layers[0].layer: layer is 11, expected a non-empty string"),
        (row_edit(1, variant="split"), 'unknown key "projection"'),
        (row_edit(0, variant="fused_uniform"), 'unknown key "projections"'),
        (row_edit(0, variant="merged"), 'variant is "merged"'),
        (row_edit(0, components=["q_proj", "v_proj", "k_proj"]), "components are"),
        (row_edit(1, components=["k_proj", "q_proj", "v_proj"]), "components are"),
        (row_edit(0, components=["q_proj", "k_proj"]), "components are"),
        (row_edit(0, components="q_proj"), "components is"),
        (
            row_edit(0, components=[1, [2], None]),
            "components are 1, an array of 1 values, null, exp",
        ),
        (row_edit(0, output_splits=[512, 128]), "output_splits has 2 entries"),
        (row_edit(0, output_splits=[512, 128, 128, 0]), "output_splits has 4 entries"),
        (
            row_edit(0, output_splits=[512, 128, 0]),
            "output_splits[2] is 0, expected an integer from 1",
        ),
        (row_edit(0, output_splits=[-512, 128, 128]), "output_splits[0] is -512"),
        (row_edit(0, output_splits=[512.0, 128, 128]), "output_splits[0] is 512.0"),
        (row_edit(0, output_splits=[True, 128, 128]), "output_splits[0] is true"),
        (row_edit(0, output_splits=["512", 128, 128]), 'output_splits[0] is "512"'),
        (row_edit(0, output_splits=[512, 10**5000, 128]), "output_splits[1] is an integer of 166"),
        (row_edit(0, output_splits=[512, 2**31, 128]), "output_splits[1] is 2147483648, expected"),
        (row_edit(0, output_splits=[None, 1, 1]), "output_splits[0] is null"),
        (row_edit(0, output_splits=768), "output_splits is 768"),
        (row_edit(0, layer=L3), "has two rows"),
        (row_edit(2, layer=L11), "expected rows in plain string order"),
        (row_edit(1, projection=[]), "projection is an array"),
    ],
)
def test_a_wrong_row_is_refused(document, expected):
    assert expected in refused(document)


@pytest.mark.parametrize("index", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": None}, 'key "name" is missing'),
        ({"name": "o_proj"}, 'name is "o_proj", expected'),
        ({"name": 1}, "name is 1, expected"),
        ({"K": None}, 'key "K" is missing'),
        ({"K": 2}, "K is 2, expected an integer from 3 to 8"),
        ({"K": 9}, "K is 9, expected"),
        ({"K": 4.0}, "K is 4.0, expected"),
        ({"K": True}, "K is true, expected"),
        ({"K": [4]}, "K is an array"),
        ({"K": 10**5000}, "K is an integer of 16610 bits"),
        ({"codebook": None}, 'key "codebook" is missing'),
        ({"codebook": "3inst"}, 'codebook is "3inst", expected one of "mcg", "mul1"'),
        ({"scale": None}, 'key "scale" is missing'),
        ({"scale": True}, "scale is true, expected one of"),
        ({"bits": 4}, 'unknown key "bits"'),
    ],
)
def test_a_wrong_projection_is_refused_in_split_and_fused_rows(index, changes, expected):
    message = refused(projection_edit(index, **changes))
    assert expected in message
    assert (
        "layers[1].projection" in message
        if index is None
        else (f"layers[0].projections[{index}]" in message)
    )


def test_projections_incomplete_or_reordered_are_refused():
    items = OBJ["layers"][0]["projections"]
    assert "projections has 2 entries" in refused(row_edit(0, projections=items[:2]))
    assert 'expected "q_proj"' in refused(row_edit(0, projections=items[::-1]))
    assert "projections has 4 entries" in refused(row_edit(0, projections=[*items, items[2]]))


def test_rows_in_numeric_order_are_refused():
    rows = sorted(OBJ["layers"], key=lambda row: int(row["layer"].split(".")[3]))
    assert [row["layer"] for row in rows] == [L3, L7, L11]
    assert "expected rows in plain string order" in refused({**OBJ, "layers": rows})


def test_text_is_parsed_like_the_object():
    assert parse_declaration_text(text(OBJ), "shard") == parse_declaration(OBJ, "config.json")
    with pytest.raises(TopologyError, match=r"^shard, __metadata__: not valid JSON"):
        parse_declaration_text("{", "shard", "__metadata__")
    double = text(OBJ).replace('"K": 6', '"K": 6, "K": 6', 1)
    with pytest.raises(TopologyError, match=r'^shard, layers\[0\]\.projections\[1\]: key "K" is'):
        parse_declaration_text(double, "shard")


def test_the_declaration_is_found_in_config_json():
    config = {"hidden_size": 256, "quantization_config": {"bits": 4, "exl3_qkv_topology": OBJ}}
    expected = parse_declaration(OBJ, "x")
    assert declaration_in_config(text(config)) == expected
    for absent in ({}, {"quantization_config": {}}, {"quantization_config": None}):
        assert declaration_in_config(text(absent)) is None


def test_a_declaration_at_the_root_of_config_json_is_refused_and_not_overlooked():
    with pytest.raises(TopologyError, match="stands at the root, expected it at quantization_conf"):
        declaration_in_config(text({"exl3_qkv_topology": OBJ}))


def test_infinities_elsewhere_in_a_config_are_none_of_our_business():
    config = {"limit": float("inf"), "quantization_config": {"exl3_qkv_topology": OBJ}}
    assert declaration_in_config(text(config)) == parse_declaration(OBJ, "x")
    nan = text(config).replace('"K": 6', '"K": NaN', 1)
    with pytest.raises(TopologyError, match=r"projections\[1\]\.K: .*K is NaN, expected"):
        declaration_in_config(nan)


def test_a_place_in_an_error_is_printable_and_short_whatever_the_keys_are():
    key = "\n\u2028" * 1000
    document = {"quantization_config": {key: {"": [{"a b": 1}]}}}
    double = text(document).replace('"a b": 1', '"a b": 1, "a b": 1')
    with pytest.raises(TopologyError) as caught:
        declaration_in_config(double)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert '[""][0]: key "a b" is given twice' in message


def test_a_declaration_that_is_null_is_not_taken_for_an_absent_one():
    config = {"quantization_config": {"exl3_qkv_topology": None}}
    with pytest.raises(TopologyError, match="exl3_qkv_topology is null, expected an object"):
        declaration_in_config(text(config))


def test_a_config_with_two_declarations_is_refused():
    config = text({"quantization_config": {"exl3_qkv_topology": OBJ}})
    double = config.replace('"exl3_qkv_topology":', '"exl3_qkv_topology": {}, "exl3_qkv_topology":')
    with pytest.raises(TopologyError, match='key "exl3_qkv_topology" is given twice'):
        declaration_in_config(double)
