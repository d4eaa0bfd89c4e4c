"""What the producer checks besides the payload: source, copies, inventory file."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from topology_samples import FACTS, L3, L7, L11, QMAP, block, edited, sample_topology, text

from exllamav3.errors import TopologyError
from exllamav3.topology import (
    ModelFacts,
    TensorMeta,
    check_copies,
    check_source,
    check_tensor_storage,
    parse_declaration,
    storage_annotation,
)

TOPOLOGY = sample_topology()
WIDTHS = {"q_proj": 512, "k_proj": 128, "v_proj": 128}


def source(changes=(), bias=False):
    tensors = {}
    for layer in (L3, L7, L11):
        for name, width in WIDTHS.items():
            tensors[f"{layer}.{name}.weight"] = TensorMeta((width, 256), "BF16")
            if bias:
                tensors[f"{layer}.{name}.bias"] = TensorMeta((width,), "BF16")
    for name, meta in dict(changes).items():
        tensors.pop(name, None)
        if meta is not None:
            tensors[name] = meta
    return tensors


def source_refused(changes=(), facts=FACTS, bias=False) -> str:
    with pytest.raises(TopologyError) as caught:
        check_source(TOPOLOGY, facts, source(changes, bias), "in_dir")
    message = str(caught.value)
    assert message.startswith(f'in_dir: layer "{L3}" cannot be fused')
    return message


def test_a_bf16_source_with_all_biases_or_none_can_be_fused():
    check_source(TOPOLOGY, FACTS, source())
    check_source(TOPOLOGY, FACTS, source(bias=True))


def test_a_split_block_may_have_any_source():
    check_source(TOPOLOGY, FACTS, source({f"{L7}.q_proj.weight": TensorMeta((1,), "F32")}))
    check_source(TOPOLOGY, FACTS, source({f"{L7}.q_proj.weight": None}))


@pytest.mark.parametrize("name", WIDTHS)
def test_a_missing_or_misshapen_or_not_bf16_source_weight_is_refused(name):
    tensor = f"{L3}.{name}.weight"
    assert f'tensor "{tensor}" is missing' in source_refused({tensor: None})
    for dtype in ("F16", "F32", "F8_E4M3", "I16"):
        meta = TensorMeta((WIDTHS[name], 256), dtype)
        assert f'"{tensor}" is {dtype}, expected BF16' in source_refused({tensor: meta})
    for shape in ((256, WIDTHS[name]), (WIDTHS[name], 128), (WIDTHS[name],), (64, 256)):
        message = source_refused({tensor: TensorMeta(shape, "BF16")})
        assert f"has shape {list(shape)}, expected [{WIDTHS[name]}, 256]" in message


def test_partial_biases_are_refused():
    message = source_refused({f"{L3}.q_proj.bias": TensorMeta((512,), "BF16")})
    assert (
        f'"{L3}.q_proj.bias" exist without "{L3}.k_proj.bias", "{L3}.v_proj.bias", exp' in message
    )
    assert "expected all three biases or none" in message
    assert "expected all three" in source_refused({f"{L3}.v_proj.bias": None}, bias=True)


def test_a_bias_of_wrong_width_or_dtype_is_refused():
    for meta in (
        TensorMeta((256,), "BF16"),
        TensorMeta((512, 1), "BF16"),
        TensorMeta((512,), "I8"),
    ):
        assert f"is {meta}, expected" in source_refused({f"{L3}.q_proj.bias": meta}, bias=True)


@pytest.mark.parametrize(
    "qmaps", [(QMAP, QMAP, "other"), (QMAP, None, QMAP), (None, None, None), ("a", "b", "c")]
)
def test_differing_or_absent_calibration_inputs_are_refused(qmaps):
    facts = ModelFacts((replace(block(L3), qmaps=qmaps), block(L7), block(L11)))
    assert "calibrated with different inputs" in source_refused(facts=facts)


def test_a_row_for_another_model_is_refused():
    with pytest.raises(TopologyError, match="is not in this model"):
        check_source(TOPOLOGY, ModelFacts((block(L7),)), source())


def test_equal_copies_pass_as_text_and_as_objects_and_may_be_absent_when_reading():
    compact, obj = TOPOLOGY.to_compact_json(), TOPOLOGY.to_obj()
    copies = {"shard 1": compact, "index": obj, "quantization_config.json": json.loads(compact)}
    check_copies(TOPOLOGY, copies, required=True)
    check_copies(parse_declaration(obj, "config.json"), copies)
    check_copies(TOPOLOGY, {"shard 1": compact.encode()}, required=True)
    check_copies(TOPOLOGY, {"shard 2": text(obj)})
    check_copies(TOPOLOGY, {})


def test_the_producer_needs_every_copy_in_its_exact_form():
    with pytest.raises(TopologyError, match=r"shard 2: the copy of quantization_config\.exl3"):
        check_copies(
            TOPOLOGY, {"shard 1": TOPOLOGY.to_compact_json(), "shard 2": None}, required=True
        )
    with pytest.raises(TopologyError, match="not compact JSON with sorted keys"):
        check_copies(TOPOLOGY, {"shard 1": text(TOPOLOGY.to_obj())}, required=True)
    with pytest.raises(TopologyError, match="not compact JSON with sorted keys"):
        check_copies(TOPOLOGY, {"shard 1": text(TOPOLOGY.to_obj()).encode()}, required=True)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda o: o["layers"][1]["projection"].update(K=5), "layers[1].projection.K is 5, exp"),
        (lambda o: o["layers"][0]["projections"][2].update(codebook="mcg"), "projections[2].codeb"),
        (lambda o: o["layers"].pop(), "layers has 2 entries, expected 3"),
        (lambda o: o["layers"][0].update(output_splits=[1, 2, 3]), "output_splits[0] is 1"),
        (lambda o: o.update(schema="x"), 'schema is "x"'),
        (lambda o: o.update(extra=1), 'unknown key "extra"'),
    ],
)
def test_a_copy_that_differs_is_refused_and_the_difference_named(edit, expected):
    obj = edited(TOPOLOGY.to_obj(), edit)
    for copy in (obj, text(obj)):
        with pytest.raises(TopologyError) as caught:
            check_copies(TOPOLOGY, {"model-00002-of-00003.safetensors": copy})
        assert str(caught.value).startswith("model-00002-of-00003.safetensors")
        assert expected in str(caught.value)


def test_a_copy_with_another_variant_is_refused():
    other = TOPOLOGY.to_obj()
    other["layers"][1] = {**other["layers"][2], "layer": L3}
    with pytest.raises(TopologyError, match=r'layers\[1\]\.variant is "split", expected "fused'):
        check_copies(TOPOLOGY, {"index": other})


@pytest.mark.parametrize("copy", ["", "{", "null", "[]", 1, [], b"\xff", True, None])
def test_a_malformed_copy_is_refused(copy):
    with pytest.raises(TopologyError, match=r"^index"):
        check_copies(TOPOLOGY, {"index": copy})


def storage():
    entries = {"lm_head": {"stored_tensors": {}}}
    for key, projection in TOPOLOGY.projections().items():
        multiplier = {"mcg": 3417055213, "mul1": 2212286765}[projection.codebook]
        entries[key] = {
            "stored_tensors": {
                f"{key}.trellis": {"shape": [16, 8, 16 * projection.bits], "dtype": "torch.int16"},
                f"{key}.{projection.codebook}": {"shape": []},
            },
            "quant_format": "exl3",
            "bits_per_weight": projection.bits,
            f"{projection.codebook}_multiplier": multiplier,
            **storage_annotation(TOPOLOGY, key),
        }
    return entries


def test_annotations_are_those_of_the_declaration():
    assert storage_annotation(TOPOLOGY, f"{L3}.qkv_proj") == {
        "codebook": "mcg",
        "scale": "always",
        "components": ["q_proj", "k_proj", "v_proj"],
        "output_splits": [512, 128, 128],
    }
    assert storage_annotation(TOPOLOGY, f"{L11}.k_proj") == {"codebook": "mul1", "scale": "never"}
    assert storage_annotation(TOPOLOGY, f"{L11}.o_proj") == {}


def test_a_faithful_tensor_storage_passes():
    check_tensor_storage(TOPOLOGY, storage())


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


QKV3, Q11 = f"{L3}.qkv_proj", f"{L11}.q_proj"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda s: s.pop(QKV3), f'entry "{QKV3}" is missing'),
        (lambda s: s.update({f"{L3}.q_proj": {}}), f'entry "{L3}.q_proj" is superfluous'),
        (lambda s: s.update({f"{L7}.qkv_proj": {}}), f'entry "{L7}.qkv_proj" is superfluous'),
        (lambda s: s.update({f"{L3}.q_proj.x": {}}), f'entry "{L3}.q_proj.x" is superfluous'),
        (lambda s: s.update({Q11: 1}), "the value is 1, expected an object"),
        (lambda s: s[Q11].pop("codebook"), "codebook is missing"),
        (lambda s: s[Q11].update(codebook="mcg"), 'codebook is "mcg", expected "mul1"'),
        (lambda s: s[Q11].update(scale="auto"), 'scale is "auto", expected "always"'),
        (lambda s: s[Q11].update(bits_per_weight=5), "bits_per_weight is 5, expected 4"),
        (lambda s: s[Q11].update(bits_per_weight=4.0), "bits_per_weight is 4.0, expected 4"),
        (lambda s: s[Q11].update(mcg_multiplier=1), "mcg_multiplier is superfluous"),
        (lambda s: s[Q11].update(mul1_multiplier=1), "mul1_multiplier is 1, expected"),
        (lambda s: s[Q11].pop("mul1_multiplier"), "mul1_multiplier is missing"),
        (lambda s: s[Q11].update(quant_format="x"), 'quant_format is "x", expected "exl3"'),
        (lambda s: s[Q11].update(components=["q_proj"]), "components is superfluous"),
        (lambda s: s[QKV3].update(components={}), "components is an object with 0 keys, expected"),
        (lambda s: s[QKV3].update(output_splits="x"), 'output_splits is "x", expected an array'),
        (lambda s: s[Q11].update(codebook=["mul1"]), "codebook is an array of 1 values, expec"),
        (lambda s: s[Q11].update(codebook={"mul1": 1}), "codebook is an object with 1 keys"),
        (lambda s: s[QKV3].pop("components"), "components is missing"),
        (lambda s: s[QKV3]["components"].reverse(), 'components[0] is "v_proj"'),
        (lambda s: s[QKV3].update(output_splits=[256, 128, 128]), "output_splits[0] is 256"),
        (lambda s: s[QKV3].pop("stored_tensors"), 'key "stored_tensors" is missing'),
        (lambda s: s[QKV3]["stored_tensors"].pop(f"{QKV3}.mcg"), f'key "{QKV3}.mcg" is missing'),
        (
            lambda s: s[QKV3]["stored_tensors"][f"{QKV3}.trellis"].update(shape=[16, 8, 64]),
            "the trellis has shape 16, 8, 64, expected three sizes, the last 96 (K=6)",
        ),
        (
            lambda s: s[QKV3]["stored_tensors"][f"{QKV3}.trellis"].update(shape=[16, 8, 96.0]),
            "the last 96 (K=6)",
        ),
        (
            lambda s: s[QKV3]["stored_tensors"][f"{QKV3}.trellis"].update(shape=[16, 96]),
            "the last 96 (K=6)",
        ),
        (
            lambda s: s[QKV3]["stored_tensors"][f"{QKV3}.trellis"].update(shape=[nested(500)] * 3),
            "the trellis has shape an array of 1 values,",
        ),
    ],
)
def test_a_tensor_storage_that_disagrees_is_refused(edit, expected):
    with pytest.raises(TopologyError) as caught:
        check_tensor_storage(TOPOLOGY, edited(storage(), edit))
    message = str(caught.value)
    assert message.startswith("quantization_config.json, tensor_storage")
    assert expected in message


@pytest.mark.parametrize("document", [None, [], "x", {1: 2}])
def test_a_tensor_storage_of_another_type_is_refused(document):
    with pytest.raises(TopologyError, match=r"^quantization_config\.json, tensor_storage"):
        check_tensor_storage(TOPOLOGY, document)
