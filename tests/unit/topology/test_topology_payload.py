"""A declaration against the model and against the tensors that are stored."""

from __future__ import annotations

import json

import pytest
from topology_samples import (
    FACTS,
    L3,
    L7,
    L11,
    PREFIX,
    block,
    edited,
    inventory_of,
    payload,
    sample_topology,
)

from exllamav3.errors import TopologyError
from exllamav3.topology import (
    ModelFacts,
    TensorMeta,
    check_payload,
    check_undeclared,
    declaration_in_config,
    parse_declaration,
    validate_declaration,
)

TOPOLOGY = sample_topology()
Q11, QKV3 = f"{L11}.q_proj", f"{L3}.qkv_proj"


def validate(obj=None, inventory=None, facts=FACTS):
    declaration = parse_declaration(TOPOLOGY.to_obj() if obj is None else obj, "config.json")
    tensors = inventory_of(TOPOLOGY) if inventory is None else inventory
    return validate_declaration(declaration, facts, tensors, "out_dir")


def refused(obj=None, inventory=None, facts=FACTS) -> str:
    with pytest.raises(TopologyError) as caught:
        validate(obj, inventory, facts)
    return str(caught.value)


def with_tensors(changes):
    """The sample's tensors with some replaced; None removes one."""
    stored = inventory_of(TOPOLOGY)
    assert {name for name, meta in changes.items() if meta is None} <= stored.keys()
    return {name: meta for name, meta in {**stored, **changes}.items() if meta is not None}


def test_a_faithful_checkpoint_gives_the_topology_it_was_made_with():
    assert validate() == TOPOLOGY
    check_payload(TOPOLOGY, FACTS, inventory_of(TOPOLOGY), "out_dir")
    validate(inventory=inventory_of(TOPOLOGY, bias=True))


def test_quantized_mtp_and_vision_attention_needs_no_row_and_may_be_called_qkv_proj():
    tensors = inventory_of(TOPOLOGY)
    assert "mtp.layers.3.self_attn.q_proj.trellis" in tensors
    assert "model.visual.blocks.0.attn.qkv_proj.trellis" in tensors
    validate(inventory=tensors)


def test_widths_that_are_no_multiples_of_128_are_padded_once_at_the_end():
    facts = ModelFacts(tuple(block(layer, 576, (576, 192, 192)) for layer in (L3, L7, L11)))
    topology = sample_topology(facts)
    tensors = inventory_of(topology, facts)
    assert tensors[f"{QKV3}.trellis"].shape == (40, 64, 96)
    assert tensors[f"{L7}.k_proj.trellis"].shape == (40, 16, 80)
    assert validate(topology.to_obj(), tensors, facts) == topology
    padded_each = TensorMeta((40, (640 + 256 + 256) // 16, 96), "I16")
    tensors[f"{QKV3}.trellis"] = padded_each
    assert "expected I16 [40, 64, 96]" in refused(topology.to_obj(), tensors, facts)


def test_a_missing_row_is_refused_whether_the_block_is_quantized_or_not():
    obj = edited(TOPOLOGY.to_obj(), lambda obj: obj["layers"].pop(2))
    message = refused(obj)
    assert message.startswith("config.json")
    assert f'layer "{L7}" has no row' in message
    assert f'and stores "{L7}.q_proj.trellis", "{L7}.k_proj.trellis", "{L7}.v_proj' in message
    dense = {name: m for name, m in inventory_of(TOPOLOGY).items() if not name.startswith(L7)}
    message = refused(obj, dense)
    assert f'layer "{L7}" has no row' in message
    assert "stores nothing" in message
    assert "has no row" in refused({**obj, "layers": []})


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (f"{PREFIX}.9.self_attn", "is not in this model"),
        (f"{PREFIX}.3.self_attn2", "is not in this model"),
        ("mtp.layers.0.self_attn", "(MTP attention) is not a full-attention"),
        (f"{PREFIX}.0.linear_attn", "(gated delta net) is not a full-attention"),
    ],
)
def test_a_superfluous_row_is_refused(layer, expected):
    def edit(obj):
        row = {**obj["layers"][2], "layer": layer}
        obj["layers"] = sorted([*obj["layers"], row], key=lambda row: row["layer"])

    message = refused(edited(TOPOLOGY.to_obj(), edit))
    assert message.startswith("config.json, layers[")
    assert expected in message
    assert L3 in message


def test_a_declaration_for_a_model_without_full_attention_is_refused():
    assert "no full-attention block" in refused(facts=ModelFacts(()))
    assert "no full-attention block" in refused(
        {**TOPOLOGY.to_obj(), "layers": []}, {}, ModelFacts(())
    )


@pytest.mark.parametrize("splits", [[256, 128, 128], [512, 128, 256], [128, 128, 512], [768, 1, 1]])
def test_splits_other_than_the_architectures_are_refused(splits):
    obj = edited(TOPOLOGY.to_obj(), lambda obj: obj["layers"][1].update(output_splits=splits))
    message = refused(obj)
    assert message.startswith(f'config.json, layers[1]: layer "{L3}": output_splits are')
    assert "expected [512, 128, 128]" in message
    assert ("a gate interleaved with the query" in message) == (splits[0] == 256)


def test_an_error_about_a_row_names_its_place_in_config_json():
    config = {"quantization_config": {"exl3_qkv_topology": TOPOLOGY.to_obj()}}
    config["quantization_config"]["exl3_qkv_topology"]["layers"][1]["output_splits"] = [1, 2, 3]
    declaration = declaration_in_config(json.dumps(config))
    with pytest.raises(TopologyError) as caught:
        validate_declaration(declaration, FACTS, inventory_of(TOPOLOGY), "out_dir")
    place = "config.json, quantization_config.exl3_qkv_topology.layers[1]: "
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("suffix", ["trellis", "suh", "svh"])
@pytest.mark.parametrize("key", [Q11, f"{L11}.v_proj", QKV3])
def test_a_missing_payload_tensor_is_refused(key, suffix):
    message = refused(inventory=with_tensors({f"{key}.{suffix}": None}))
    assert message.startswith("out_dir: layer")
    assert f'tensor "{key}.{suffix}" is missing; stored are' in message


def test_a_block_that_is_not_quantized_is_refused():
    tensors = {n: m for n, m in inventory_of(TOPOLOGY).items() if not n.startswith(f"{Q11}.")}
    assert "is missing; nothing is stored" in refused(inventory=tensors)
    tensors[f"{Q11}.weight"] = TensorMeta((512, 256), "BF16")
    assert 'is missing; stored are "weight"' in refused(inventory=tensors)


def test_a_payload_of_the_other_topology_is_refused_even_beside_the_right_one():
    extra = inventory_of(TOPOLOGY) | payload(f"{L7}.qkv_proj", 256, 768, 5, "mul1")
    assert "a split block stores nothing under" in refused(inventory=extra)
    extra = inventory_of(TOPOLOGY) | payload(f"{L3}.k_proj", 256, 128, 6, "mcg")
    message = refused(inventory=extra)
    assert "a fused_uniform block stores nothing under" in message
    assert f'"{L3}.k_proj.' in message


@pytest.mark.parametrize("name", ["weight", "bias", "suh", "mcg", "lora_A.weight"])
def test_any_tensor_of_the_other_topology_is_refused(name):
    meta = TensorMeta((512,), "F16")
    assert f'"{L3}.q_proj.{name}" is stored' in refused(
        inventory=with_tensors({f"{L3}.q_proj.{name}": meta})
    )
    assert f'"{L7}.qkv_proj.{name}" is stored' in refused(
        inventory=with_tensors({f"{L7}.qkv_proj.{name}": meta})
    )


def test_the_topologies_swapped_are_refused():
    obj = TOPOLOGY.to_obj()
    split_everywhere = {n: m for n, m in inventory_of(TOPOLOGY).items() if L3 not in n}
    for name, width in (("q_proj", 512), ("k_proj", 128), ("v_proj", 128)):
        split_everywhere |= payload(f"{L3}.{name}", 256, width, 6, "mcg")
    assert "declared fused_uniform" in refused(obj, split_everywhere)


@pytest.mark.parametrize("key", [Q11, QKV3])
def test_markers_must_be_exactly_the_declared_one(key):
    declared = "mul1" if key == Q11 else "mcg"
    other = "mcg" if key == Q11 else "mul1"
    scalar = TensorMeta((), "I32")
    none = with_tensors({f"{key}.{declared}": None})
    assert "no marker (which means 3inst)" in refused(inventory=none)
    wrong = with_tensors({f"{key}.{declared}": None, f"{key}.{other}": scalar})
    assert f'has codebook marker "{other}", expected exactly "{declared}"' in refused(
        inventory=wrong
    )
    both = with_tensors({f"{key}.{other}": scalar})
    assert 'has codebook marker "mcg", "mul1"' in refused(inventory=both)
    for meta in (TensorMeta((), "F32"), TensorMeta((2,), "I32"), TensorMeta((0,), "I32")):
        assert "expected one I32 value" in refused(
            inventory=with_tensors({f"{key}.{declared}": meta})
        )
    validate(inventory=with_tensors({f"{key}.{declared}": TensorMeta((1,), "I32")}))


@pytest.mark.parametrize(
    ("meta", "expected"),
    [
        (TensorMeta((16, 32, 80), "I16"), "which is K=5, expected the declared K=4"),
        (TensorMeta((16, 32, 24), "I16"), "which is K=1.5, expected the declared K=4"),
        (TensorMeta((16, 32, 0), "I16"), "which is K=0"),
        (TensorMeta((16, 24, 64), "I16"), "is I16 [16, 24, 64], expected I16 [16, 32, 64]"),
        (TensorMeta((32, 32, 64), "I16"), "expected I16 [16, 32, 64]"),
        (TensorMeta((16, 32, 64), "I32"), "is I32 [16, 32, 64], expected I16"),
        (TensorMeta((16, 32), "I16"), "expected I16 [16, 32, 64]"),
        (TensorMeta((), "I16"), "expected I16 [16, 32, 64]"),
        (TensorMeta((16, 32, 64, 1), "I16"), "expected I16 [16, 32, 64]"),
    ],
)
def test_a_trellis_of_other_k_or_shape_is_refused(meta, expected):
    message = refused(inventory=with_tensors({f"{Q11}.trellis": meta}))
    assert f'"{Q11}.trellis"' in message
    assert expected in message


@pytest.mark.parametrize(
    ("name", "meta"),
    [
        (f"{Q11}.suh", TensorMeta((512,), "F16")),
        (f"{Q11}.svh", TensorMeta((256,), "F16")),
        (f"{Q11}.suh", TensorMeta((256,), "BF16")),
        (f"{Q11}.suh", TensorMeta((1, 256), "F16")),
        (f"{QKV3}.svh", TensorMeta((512,), "F16")),
        (f"{QKV3}.suh", TensorMeta((128,), "F16")),
        (f"{QKV3}.bias", TensorMeta((512,), "F16")),
        (f"{QKV3}.bias", TensorMeta((768,), "F32")),
        (f"{Q11}.bias", TensorMeta((512,), "BF16")),
    ],
)
def test_scales_and_biases_of_wrong_length_or_dtype_are_refused(name, meta):
    message = refused(inventory=with_tensors({name: meta}))
    assert f'tensor "{name}" is {meta}, expected' in message


@pytest.mark.parametrize("suffix", ["su", "sv", "weight", "scale", "trellis.extra"])
def test_a_tensor_that_no_exl3_linear_has_is_refused(suffix):
    tensors = with_tensors({f"{QKV3}.{suffix}": TensorMeta((16,), "I16")})
    assert "an EXL3 linear has only" in refused(inventory=tensors)


def test_a_checkpoint_of_nothing_but_declared_tensors_is_searched_to_its_last_name():
    keys = TOPOLOGY.projections()
    tensors = {
        name: meta
        for name, meta in inventory_of(TOPOLOGY).items()
        if name.rpartition(".")[0] in keys
    }
    assert max(tensors) == f"{L7}.v_proj.trellis"
    validate(inventory=tensors)
    last = f"{L7}.v_proj.weight"
    assert f'"{last}" is stored' in refused(
        inventory=tensors | {last: TensorMeta((128, 256), "F16")}
    )


def test_a_split_payload_may_have_a_float32_bias():
    validate(inventory=with_tensors({f"{Q11}.bias": TensorMeta((512,), "F32")}))


def test_names_that_only_start_alike_are_left_alone():
    validate(
        inventory=with_tensors(
            {
                f"{L3}.q_proj_norm.weight": TensorMeta((1,), "F16"),
                f"{L3}1.q_proj.weight": TensorMeta((1,), "F16"),
                f"{L7}.qkv_projection.weight": TensorMeta((1,), "F16"),
            }
        )
    )


def test_the_producer_check_refuses_a_row_for_another_model():
    with pytest.raises(TopologyError, match="is no full-attention block"):
        check_payload(TOPOLOGY, ModelFacts((block(L3),)), inventory_of(TOPOLOGY), "out_dir")


def test_fusion_is_not_inferred_from_tensor_names():
    with pytest.raises(TopologyError) as caught:
        check_undeclared(FACTS, inventory_of(TOPOLOGY), "out_dir")
    message = str(caught.value)
    assert message.startswith(f'out_dir: tensor "{QKV3}.trellis"')
    assert "fusion is never inferred" in message
    for suffix in ("suh", "svh"):
        with pytest.raises(TopologyError, match="never inferred"):
            check_undeclared(FACTS, {f"{L7}.qkv_proj.{suffix}": TensorMeta((1,), "F16")})


def test_an_undeclared_split_checkpoint_and_a_source_weight_called_qkv_proj_are_fine():
    tensors = {n: m for n, m in inventory_of(TOPOLOGY).items() if L3 not in n}
    tensors[f"{L3}.qkv_proj.weight"] = TensorMeta((768, 256), "BF16")
    check_undeclared(FACTS, tensors)
