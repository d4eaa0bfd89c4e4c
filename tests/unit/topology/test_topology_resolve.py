"""Resolution of a plan against a model and a job."""

from __future__ import annotations

import json

import pytest
from topology_samples import ALLOCATED, FACTS, L3, L7, L11, PLAN, PREFIX, edited, text

from exllamav3.errors import TopologyError
from exllamav3.topology import (
    ModelFacts,
    Projection,
    check_plan,
    check_resumed_plan,
    parse_declaration,
    parse_plan,
    resolve_plan,
)


def resolve(document=PLAN, facts=FACTS, codebook="mul1", scale="always", allocated=ALLOCATED):
    return resolve_plan(parse_plan(text(document), "plan.json"), facts, codebook, scale, allocated)


def refused(*args, **kwargs) -> str:
    with pytest.raises(TopologyError) as caught:
        resolve(*args, **kwargs)
    return str(caught.value)


def named(layer: str) -> dict:
    return {"schema": PLAN["schema"], "layers": [{"layer": layer, "variant": "split"}]}


def test_the_sample_resolves_to_the_documented_declaration():
    splits = {"components": ["q_proj", "k_proj", "v_proj"], "output_splits": [512, 128, 128]}
    expected = {
        "schema": "exl3_qkv_topology/1",
        "layers": [
            {
                "layer": L11,
                "variant": "split",
                **splits,
                "projections": [
                    {"name": "q_proj", "K": 4, "codebook": "mul1", "scale": "always"},
                    {"name": "k_proj", "K": 6, "codebook": "mul1", "scale": "never"},
                    {"name": "v_proj", "K": 6, "codebook": "mul1", "scale": "always"},
                ],
            },
            {
                "layer": L3,
                "variant": "fused_uniform",
                **splits,
                "projection": {"name": "qkv_proj", "K": 6, "codebook": "mcg", "scale": "always"},
            },
            {
                "layer": L7,
                "variant": "split",
                **splits,
                "projections": [
                    {"name": f"{n}_proj", "K": 5, "codebook": "mul1", "scale": "always"}
                    for n in "qkv"
                ],
            },
        ],
    }
    assert resolve().to_obj() == expected
    assert resolve().to_compact_json() == json.dumps(
        expected, sort_keys=True, separators=(",", ":")
    )


def test_an_empty_plan_makes_every_block_split_with_the_jobs_settings():
    topology = resolve({"schema": PLAN["schema"], "layers": []}, codebook="mcg", scale="auto")
    assert [row.variant for row in topology.rows] == ["split"] * 3
    assert {p.codebook for p in topology.projections().values()} == {"mcg"}
    assert {p.scale for p in topology.projections().values()} == {"auto"}
    assert {p.bits for p in topology.projections().values()} == {5}
    assert topology.first_fused() is None


def test_the_same_input_gives_the_same_bytes_in_any_row_order():
    shuffled = edited(PLAN, lambda plan: plan["layers"].reverse())
    facts = ModelFacts(tuple(reversed(FACTS.attention)), FACTS.other)
    assert resolve(shuffled, facts).to_compact_json() == resolve().to_compact_json()


def test_the_resolved_topology_answers_by_layer_and_by_key():
    topology = resolve()
    assert topology.is_fused(L3)
    assert not topology.is_fused(L7)
    assert not topology.is_fused("mtp.layers.3.self_attn")
    assert topology.row("mtp.layers.3.self_attn") is None
    assert topology.first_fused() == L3
    assert topology.projection(f"{L3}.qkv_proj") == Projection("qkv_proj", 6, "mcg", "always")
    assert topology.projection(f"{L3}.q_proj") is None
    assert topology.projection(f"{L11}.o_proj") is None
    row = topology.row(L3)
    assert row.fused_width == 768
    assert row.stored_widths == (768,)
    assert topology.row(L11).stored_widths == (512, 128, 128)


def test_the_public_geometry_fuses_to_14336_columns():
    row = resolve().row(L3)
    public = type(row)(L3, (12288, 1024, 1024), row.projections)
    assert public.stored_widths == (14336,)
    padded_once = type(row)(L3, (576, 192, 192), row.projections)
    assert padded_once.stored_widths == (1024,)


def test_of_several_wrong_rows_the_first_in_the_file_is_named():
    rows = (
        named("model.layers.3.self_attn")["layers"] + named("model.layers.11.self_attn")["layers"]
    )
    message = refused({"schema": PLAN["schema"], "layers": rows})
    assert message.startswith('plan.json, layers[0]: layer "model.layers.3.self_attn" is not')


def test_a_stated_k_changes_no_other_tensor_and_a_fused_block_needs_no_allocation():
    allocated = {key: bits for key, bits in ALLOCATED.items() if not key.startswith(L3)}
    assert resolve(allocated=allocated) == resolve()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (f"{PREFIX}.4.self_attn", "is not in this model"),
        ("model.layers.3.self_attn", "is not in this model"),
        (f"{L3}.q_proj", "is not in this model"),
        (
            f"{PREFIX}.0.linear_attn",
            "(gated delta net) is not a full-attention block of the text decoder",
        ),
        ("mtp.layers.0.self_attn", "(MTP attention) is not a full-attention block"),
        ("model.visual.blocks.0.attn", "(vision attention) is not"),
        ("x" * 10_000, "is not in this model"),
    ],
)
def test_an_unknown_or_foreign_layer_is_named_with_the_layers_it_could_have_been(layer, expected):
    message = refused(named(layer))
    assert message.startswith("plan.json, layers[0]")
    assert layer[:100] in message
    assert expected in message
    assert all(candidate in message for candidate in (L3, L7, L11))
    assert len(message) < 1000


def test_the_layer_most_alike_is_listed_first():
    message = refused(named("model.layers.7.self_attn"))
    assert f'of this model: "{L7}"' in message


def test_a_model_without_full_attention_is_refused_even_with_an_empty_plan():
    facts = ModelFacts((), {f"{PREFIX}.0.linear_attn": "gated delta net"})
    assert "no full-attention block" in refused({"schema": PLAN["schema"], "layers": []}, facts)


@pytest.mark.parametrize("codebook", ["3inst", "MUL1", ""])
def test_a_job_codebook_outside_the_domain_is_refused(codebook):
    assert "job settings, --codebook" in refused(codebook=codebook)


@pytest.mark.parametrize("scale", ["yaqa", ""])
def test_a_job_scale_outside_the_domain_is_refused(scale):
    assert "job settings, --out_scales" in refused(scale=scale)


@pytest.mark.parametrize("bits", [2, 1, 9, 16, 3.5, 4.0, True, None])
def test_a_split_projection_without_an_integer_k_of_3_to_8_is_refused(bits):
    message = refused(allocated={**ALLOCATED, f"{L7}.k_proj": bits})
    assert f"{L7}.k_proj" in message
    assert "needs an integer K from 3 to 8" in message
    assert ("gets no k from" if bits is None else f"gets K={bits}".lower()) in message.lower()
    assert "job settings, --bits" in refused(allocated={})


def test_a_stated_k_makes_up_for_an_allocation_outside_the_domain():
    assert resolve(allocated={**ALLOCATED, f"{L11}.k_proj": 2}) == resolve()


def test_check_plan_needs_no_allocation():
    check_plan(parse_plan(text(PLAN), "plan.json"), FACTS, "mul1", "auto")
    with pytest.raises(TopologyError, match="is not in this model"):
        check_plan(parse_plan(text(named("x")), "plan.json"), FACTS, "mul1", "auto")


def test_the_resolved_json_parses_to_an_equal_declaration():
    topology = resolve()
    declaration = parse_declaration(topology.to_obj(), "config.json")
    assert declaration.rows == topology.rows
    assert declaration.to_obj() == topology.to_obj()


def test_resuming_with_another_plan_is_refused_and_without_one_is_not():
    stored = parse_plan(text(PLAN), "job")
    check_resumed_plan(stored, None)
    check_resumed_plan(None, None)
    check_resumed_plan(stored, parse_plan(text(PLAN), "elsewhere.json"))
    other = edited(PLAN, lambda plan: plan["layers"][2]["projections"][0].update(K=5))
    with pytest.raises(TopologyError) as caught:
        check_resumed_plan(stored, parse_plan(text(other), "other.json"))
    message = str(caught.value)
    assert message.startswith("other.json: the plan differs from the one this job was started")
    assert f'layer "{L11}" was split (q_proj K=4; k_proj K=6 scale=never; ' in message
    assert "and is now split (q_proj K=5;" in message
    shorter = edited(PLAN, lambda plan: plan["layers"].pop(0))
    with pytest.raises(TopologyError, match="is now not listed"):
        check_resumed_plan(stored, parse_plan(text(shorter), "other.json"))
    with pytest.raises(TopologyError, match="which had none"):
        check_resumed_plan(None, stored)
