"""Parsing of plans: what is accepted, and what each malformed plan is told."""

from __future__ import annotations

import codecs
import json

import pytest
from topology_samples import L3, L7, L11, PLAN, edited, text

from exllamav3.errors import TopologyError
from exllamav3.topology import load_plan, parse_plan


def refused(document: object) -> str:
    with pytest.raises(TopologyError) as caught:
        parse_plan(document if isinstance(document, str | bytes) else text(document), "plan.json")
    message = str(caught.value)
    assert message.startswith("plan.json")
    return message


def row_edit(index: int, **changes):
    """The sample plan with keys of one row replaced; None removes a key."""

    def edit(plan):
        for key, value in changes.items():
            if value is None:
                plan["layers"][index].pop(key)
            else:
                plan["layers"][index][key] = value

    return edited(PLAN, edit)


def test_the_sample_plan_is_read_completely():
    plan = parse_plan(text(PLAN), "plan.json")
    assert [row.layer for row in plan.rows] == sorted([L3, L7, L11])
    fused = next(row for row in plan.rows if row.layer == L3)
    assert fused.is_fused
    (qkv,) = fused.projections
    assert (qkv.name, qkv.bits, qkv.codebook, qkv.scale) == ("qkv_proj", 6, "mcg", "always")
    mixed = next(row for row in plan.rows if row.layer == L11)
    assert [p.bits for p in mixed.projections] == [4, 6, 6]
    assert [p.codebook for p in mixed.projections] == [None, None, "mul1"]
    assert [p.scale for p in mixed.projections] == [None, "never", None]


def test_an_empty_plan_is_allowed():
    assert parse_plan('{"schema": "exl3_qkv_topology/1", "layers": []}', "p").rows == ()


def test_projections_may_state_any_of_the_three_settings_or_none():
    stated = [{"name": "q_proj"}, {"name": "k_proj", "K": 3}, {"name": "v_proj", "scale": "auto"}]
    plan = parse_plan(text(row_edit(2, projections=stated)), "p")
    row = next(row for row in plan.rows if row.layer == L11)
    assert [(p.bits, p.codebook, p.scale) for p in row.projections] == [
        (None, None, None),
        (3, None, None),
        (None, None, "auto"),
    ]


def test_content_counts_and_neither_row_order_nor_file_name():
    shuffled = edited(PLAN, lambda plan: plan["layers"].reverse())
    one, two = parse_plan(text(PLAN), "a.json"), parse_plan(text(shuffled), "b.json")
    assert one == two
    assert one.to_json() == two.to_json()
    assert one != parse_plan(text(row_edit(0, K=5)), "a.json")


def test_canonical_content_parses_to_the_same_plan():
    plan = parse_plan(text(PLAN), "plan.json")
    assert parse_plan(plan.to_json(), "again") == plan
    assert json.loads(plan.to_json()) == plan.to_obj()


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            [],
            "plan.json: the document is an array of 0 values, expected an object. A plan is an "
            'object: {"schema": "exl3_qkv_topology/1", "layers": [...]}.',
        ),
        (None, "the document is null, expected an object"),
        ("exl3", "not valid JSON"),
        ({**PLAN, "schema": "exl3_qkv_topology/2"}, 'schema is "exl3_qkv_topology/2", expected'),
        ({**PLAN, "schema": 1}, "schema is 1, expected"),
        ({"layers": []}, 'key "schema" is missing, found "layers"'),
        ({"schema": PLAN["schema"]}, 'key "layers" is missing'),
        ({**PLAN, "layer": []}, 'unknown key "layer", expected "schema", "layers"; did you mean'),
        ({**PLAN, "layers": {}}, "plan.json, layers: layers is an object with 0 keys, expected an"),
        ({**PLAN, "layers": [3]}, "plan.json, layers[0]: layers[0] is 3, expected an object"),
    ],
)
def test_a_wrong_root_is_refused(document, expected):
    assert expected in refused(text(document) if document != "exl3" else document)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (row_edit(0, layer=None), 'plan.json, layers[0]: key "layer" is missing'),
        (row_edit(0, layer=3), "plan.json, layers[0].layer: layer is 3, expected a non-empty"),
        (row_edit(0, layer=""), 'layer is "", expected a non-empty string'),
        (row_edit(0, layer=[L3]), "layer is an array of 1 values"),
        (row_edit(1, layer=L3), "is listed twice, first in layers[0]"),
        (row_edit(0, variant=None), 'key "variant" is missing'),
        (row_edit(0, variant="fused"), 'variant is "fused", expected one of "split", "fused_unif'),
        (row_edit(0, variant=["split"]), "variant is an array of 1 values"),
        (row_edit(0, bits=6), 'unknown key "bits", expected'),
        (row_edit(1, note="x"), 'unknown key "note"'),
        (row_edit(0, K=None), 'key "K" is missing'),
        (row_edit(0, codebook=None), 'key "codebook" is missing'),
        (row_edit(0, scale=None), 'key "scale" is missing'),
        (row_edit(1, K=4), 'a split row has "K" at its top level'),
        (row_edit(1, codebook="mcg"), 'a split row has "codebook" at its top level'),
        (row_edit(1, scale="auto"), 'a split row has "scale" at its top level'),
        (row_edit(2, K=4), 'a split row has "K" at its top level'),
        (row_edit(0, projections=[]), 'a fused_uniform row has the key "projections"'),
    ],
)
def test_a_wrong_row_is_refused(document, expected):
    assert expected in refused(document)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9, "9"),
        (2, "2"),
        (-4, "-4"),
        (16, "16"),
        (True, "true"),
        (4.0, "4.0"),
        (3.5, "3.5"),
        ("4", '"4"'),
        ([4, 4, 4], "an array of 3 values"),
        ({"q_proj": 4}, "an object with 1 keys"),
        (10**60, "an integer of 200 bits"),
    ],
)
def test_a_k_of_wrong_type_or_range_is_refused_fused_and_split(value, shown):
    message = refused(row_edit(0, K=value))
    assert f'plan.json, layers[0].K: layer "{L3}": K is {shown}, expected an integer from 3' in (
        message
    )
    document = edited(PLAN, lambda plan: plan["layers"][2]["projections"][1].update(K=value))
    assert "plan.json, layers[2].projections[1].K" in refused(document)


def test_a_null_k_is_refused_and_not_taken_for_unstated():
    document = edited(PLAN, lambda plan: plan["layers"][2]["projections"][1].update(K=None))
    assert "K is null, expected an integer from 3 to 8" in refused(document)


@pytest.mark.parametrize("key", ["codebook", "scale"])
@pytest.mark.parametrize("value", ["3inst", "MCG", "yaqa", "", 1, True, ["mcg"], {"q_proj": "mcg"}])
def test_a_codebook_or_scale_outside_the_domain_is_refused(key, value):
    assert f"plan.json, layers[0].{key}" in refused(row_edit(0, **{key: value}))
    document = edited(PLAN, lambda plan: plan["layers"][2]["projections"][0].update({key: value}))
    assert f"plan.json, layers[2].projections[0].{key}" in refused(document)


@pytest.mark.parametrize(
    ("projections", "expected"),
    [
        ([], "projections has 0 entries, expected 3"),
        ([{"name": "q_proj"}, {"name": "k_proj"}], "projections has 2 entries, expected 3"),
        ([{"name": f"{n}_proj"} for n in "kqv"], 'name is "k_proj", expected "q_proj"'),
        ([{"name": f"{n}_proj"} for n in "qkvo"], "projections has 4 entries"),
        ([{"name": f"{n}_proj"} for n in "qqv"], 'name is "q_proj", expected "k_proj"'),
        ([{"name": "qkv_proj"}] * 3, 'name is "qkv_proj", expected "q_proj"'),
        ([{"K": 4}, {}, {}], 'layers[2].projections[0]: layer "'),
        ([{"name": 1}] * 3, "name is 1, expected"),
        (["q_proj", "k_proj", "v_proj"], 'projections[0] is "q_proj", expected an object'),
        ({"q_proj": {}}, "projections is an object with 1 keys, expected an array"),
        ([{"name": f"{n}_proj", "bits": 4} for n in "qkv"], 'unknown key "bits"'),
    ],
)
def test_projections_incomplete_reordered_or_unknown_are_refused(projections, expected):
    assert expected in refused(row_edit(2, projections=projections))


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ('{"schema": "exl3_qkv_topology/1", "layers": [], "layers": []}', "plan.json: key"),
        (text(PLAN).replace('"K": 6,', '"K": 6, "K": 6,', 1), "plan.json, layers[0]: key"),
        (text(PLAN).replace('"K": 4', '"K": 4, "K": 5'), "layers[2].projections[0]: key"),
        (text(PLAN).replace('"scale"', '"codebook"', 1), "layers[0]: key"),
    ],
)
def test_duplicate_keys_are_refused_wherever_they_are(document, place):
    message = refused(document)
    assert place in message
    assert "is given twice" in message


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"\xff\xfe{\x00",
        b'{"schema": "\xe9"}',
        b"\xef\xbb\xbf{}",
        "{" * 10,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000 + "1" + "}" * 200_000,
        text(PLAN) + "{}",
        text(PLAN).replace("6", "NaN", 1),
        text(PLAN).replace("6", "Infinity", 1),
        text(PLAN).replace("6", "9" * 5000, 1),
        text(PLAN).replace("6", "6" + "." + "0" * 5000, 1),
        text(PLAN).replace("6", "1e999", 1),
        text(PLAN).replace("mcg", "\\ud800", 1),
        "{'schema': 1}",
    ],
)
def test_hostile_documents_are_refused_in_one_printable_line(document):
    message = refused(document)
    assert "\n" not in message
    assert message.isascii()
    assert len(message) < 1000


@pytest.mark.parametrize("number", ["9" * 65, "6." + "0" * 63])
def test_a_number_too_long_to_be_meant_is_refused_by_its_length(number):
    assert "a number has 65 characters, at most 64 are read" in refused(
        text(PLAN).replace("6", number, 1)
    )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_a_good_plan_in_another_encoding_is_refused(encoding):
    parse_plan(text(PLAN).encode("utf-8"), "plan.json")
    refused(text(PLAN).encode(encoding))


def test_a_message_about_many_keys_counts_those_it_does_not_show():
    many = {f"key{n}": n for n in range(1000)}
    assert '"key8" and 991 more' in refused(text({"schema": PLAN["schema"], "layers": [many]}))
    assert 'key "layer" is missing, found nothing' in refused(
        text({"schema": PLAN["schema"], "layers": [{}]})
    )


def test_a_long_string_is_cut_in_messages():
    assert f'variant is "{"x" * 120}...", expected' in refused(row_edit(0, variant="x" * 10_000))


def test_a_plan_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(TopologyError, match=r"absent\.json: the QKV topology plan cannot be read"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(TopologyError, match="cannot be read"):
        load_plan(tmp_path)


def test_a_plan_file_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text(PLAN))
    assert load_plan(path) == parse_plan(text(PLAN), "x")
    path.write_text(text(row_edit(0, K=9)))
    with pytest.raises(TopologyError, match=r"plan\.json, layers\[0\]\.K: .*K is 9"):
        load_plan(path)


def test_a_byte_order_mark_is_named():
    text = codecs.BOM_UTF8 + b'{"schema": "exl3_qkv_topology/1", "layers": []}'
    with pytest.raises(TopologyError, match=r"p\.json: it begins with a byte order mark\. Save"):
        parse_plan(text, "p.json")
