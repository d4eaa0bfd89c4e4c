"""Checkpoints that declare a QKV topology: they load as declared, or not at all."""

import inspect
import json

import pytest
import torch
from tiny_models import (
    dequantized,
    linear_widths,
    load_model,
    qwen35_config,
    random_exl3,
    random_tensors,
    relative_error,
    write_folder,
)

from exllamav3.errors import TopologyError, UnsupportedError
from exllamav3.model import declaration
from exllamav3.model.config import Config
from exllamav3.model.model import Model
from exllamav3.modules.module import DictSource
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

KEY = "exl3_qkv_topology"
IDS = torch.arange(12).view(2, 6) * 7 % 130
LAYERS = ("model.layers.1.self_attn", "model.layers.2.self_attn")
SPLITS = (256, 64, 64)
FUSED = (Projection("qkv_proj", 4, "mul1", "always"),)
SPLIT = (
    Projection("q_proj", 4, "mul1", "always"),
    Projection("k_proj", 6, "mcg", "never"),
    Projection("v_proj", 5, "mul1", "auto"),
)


def config_json(**changes):
    """One gated delta net and two gated attention blocks."""
    kinds = ["linear_attention", "full_attention", "full_attention"]
    return qwen35_config() | {"num_hidden_layers": 3, "layer_types": kinds} | changes


def topology(*fused):
    """The attention blocks of the given layer numbers fused, the others split."""
    rows = [
        TopologyRow(layer, SPLITS, FUSED)
        if int(layer.split(".")[2]) in fused
        else TopologyRow(layer, SPLITS, SPLIT)
        for layer in LAYERS
    ]
    return ResolvedTopology(tuple(rows))


def checkpoint(resolved):
    def quantize(linear):
        declared = resolved.projection(linear.key)
        bits, codebook = (declared.bits, declared.codebook) if declared else (4, "mul1")
        return random_exl3(
            linear.key, linear.in_features, linear.out_features, bits=bits, codebook=codebook
        )

    return random_tensors(config_json(), topology=resolved, quantize=quantize)


def write(folder, resolved, tensors=None, declared=True, **options):
    section = {"quant_method": "exl3", "version": "0.1.0", "bits": 4.0}
    if declared:
        section[KEY] = resolved.to_obj()
        options.setdefault("metadata", {KEY: resolved.to_compact_json()})
    config = config_json(quantization_config=section)
    tensors = checkpoint(resolved) if tensors is None else tensors
    return write_folder(folder, config, tensors, **options)


def build(folder):
    return Model.from_config(Config.from_directory(folder))


@pytest.mark.parametrize("fused", [(), (1,), (1, 2)])
def test_a_declared_checkpoint_loads_and_takes_the_declared_routes(tmp_path, fused):
    resolved = topology(*fused)
    model = load_model(write(tmp_path, resolved))
    assert model.topology == resolved
    logits = model.forward(IDS)
    expected = {
        layer: {"fused" if int(layer.split(".")[2]) in fused else "split": 1} for layer in LAYERS
    }
    assert model.routes() == expected
    dense_model = Model.from_config(Config(config_json()))
    dense_model.load(device="cpu", source=DictSource(cut(checkpoint(resolved), model)))
    assert relative_error(logits, dense_model.forward(IDS)) < 1e-4


def cut(tensors, model):
    """Decode a checkpoint, its fused matrices cut into q, k and v."""
    dense = dequantized(tensors, linear_widths(model))
    for layer in LAYERS:
        fused = dense.pop(f"{layer}.qkv_proj.weight", None)
        if fused is not None:
            for name, part in zip("qkv", fused.split(SPLITS), strict=True):
                dense[f"{layer}.{name}_proj.weight"] = part
    return dense


def test_a_sharded_checkpoint_carries_copies_that_agree(tmp_path):
    resolved = topology(1)
    index_metadata = {"total_size": 0, KEY: resolved.to_obj()}
    folder = write(tmp_path, resolved, shards=2, index_metadata=index_metadata)
    assert build(folder).topology == resolved


def test_tensor_parallelism_names_the_first_fused_layer(tmp_path):
    model = build(write(tmp_path, topology(2)))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.2\.self_attn stores q, k and v"):
        model.load(device="cpu", source=DictSource({}), tensor_p=True)


def test_a_fused_payload_without_a_declaration_is_refused(tmp_path):
    folder = write(tmp_path, topology(1), declared=False)
    with pytest.raises(TopologyError, match=r"payload of a fused block, but config\.json has"):
        build(folder)


def test_a_copy_without_a_declaration_is_refused(tmp_path):
    resolved = topology()
    folder = write(tmp_path, resolved, declared=False, metadata={KEY: resolved.to_compact_json()})
    with pytest.raises(TopologyError, match=r"__metadata__\.exl3_qkv_topology: carries"):
        build(folder)


def test_a_shard_header_that_differs_is_refused(tmp_path):
    other = {KEY: topology(2).to_compact_json()}
    with pytest.raises(TopologyError, match=r"model\.safetensors"):
        build(write(tmp_path, topology(1), metadata=other))


def test_a_quantization_config_that_differs_is_refused(tmp_path):
    folder = write(tmp_path, topology(1))
    (folder / "quantization_config.json").write_text(json.dumps({KEY: topology(2).to_obj()}))
    with pytest.raises(TopologyError, match=r"quantization_config\.json"):
        build(folder)


def test_an_index_that_differs_is_refused(tmp_path):
    index_metadata = {KEY: topology(2).to_obj()}
    folder = write(tmp_path, topology(1), shards=2, index_metadata=index_metadata)
    with pytest.raises(TopologyError, match=r"index\.json"):
        build(folder)


def test_a_payload_in_the_other_form_is_refused(tmp_path):
    with pytest.raises(TopologyError):
        build(write(tmp_path, topology(1), tensors=checkpoint(topology(2))))


def test_a_rate_other_than_the_declared_is_refused(tmp_path):
    tensors = checkpoint(topology(1))
    tensors |= random_exl3(f"{LAYERS[0]}.qkv_proj", 128, sum(SPLITS), bits=5)
    with pytest.raises(TopologyError, match="K"):
        build(write(tmp_path, topology(1), tensors=tensors))


def test_a_topology_given_by_the_caller_builds_the_tree_of_an_unquantized_model():
    model = Model.from_config(Config(config_json()), topology=topology(1))
    assert [attention.is_fused for attention in model.attention_layers()] == [True, False]
    assert [m.key for m in model.attention_layers()[0].modules][:2] == [
        f"{LAYERS[0]}.qkv_proj",
        f"{LAYERS[0]}.o_proj",
    ]


def test_a_quantized_mtp_head_beside_declared_blocks_needs_no_row(tmp_path):
    resolved = topology(1)
    config = config_json(mtp_num_hidden_layers=1)
    tensors = checkpoint(resolved)
    for name, width in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64)):
        tensors |= random_exl3(f"mtp.layers.1.self_attn.{name}", 128, width)
    section = {"quant_method": "exl3", "version": "0.1.0", "bits": 4.0, KEY: resolved.to_obj()}
    folder = write_folder(tmp_path, config | {"quantization_config": section}, tensors)
    assert load_model(folder).forward(IDS).shape == (2, 6, 130)


@pytest.mark.parametrize("quantized", [False, True])
def test_without_a_declaration_nothing_of_the_topology_package_runs(
    tmp_path, monkeypatch, quantized
):
    for name, value in vars(declaration).items():
        if inspect.isfunction(value) and value.__module__.startswith("exllamav3.topology"):
            monkeypatch.setattr(declaration, name, lambda *args: pytest.fail("called"))
    resolved = topology()
    if quantized:
        folder = write(tmp_path, resolved, declared=False)
    else:
        folder = write_folder(tmp_path, config_json(), random_tensors(config_json()))
    model = load_model(folder)
    model.forward(IDS)
    assert model.topology is None
    assert set(model.routes()[LAYERS[0]]) == {"split"}
