"""Our files against those of the established converter for the same sources, values aside."""

from __future__ import annotations

import json

import pytest
import torch
from conversion_support import folder_bytes, stand_in_quantize
from exllamav3.conversion import ConversionOptions, convert, pipeline
from safetensors import safe_open

from exllamav3 import Config, Model
from exllamav3.checkpoint.tensor_files import TensorFiles

CASES = [
    ("tiny-llama", "tiny-llama-4bpw-mul1-always", "mul1"),
    ("tiny-qwen2", "tiny-qwen2-4bpw-mul1-always", "mul1"),
    ("tiny-qwen3", "tiny-qwen3-4bpw-mcg-always", "mcg"),
    ("tiny-qwen35-vl", "tiny-qwen35-vl-4bpw-mul1-always", "mul1"),
]
VISION = "model.visual."


@pytest.fixture(scope="module", params=CASES, ids=[case[0] for case in CASES])
def pair(request, data_dir, tmp_path_factory):
    """(source, theirs, ours) folders."""
    source, theirs, codebook = request.param
    root = tmp_path_factory.mktemp(source)
    interop = data_dir / "interop"
    options = ConversionOptions(
        in_dir=str(interop / "source" / source),
        work_dir=str(root / "work"),
        out_dir=str(root / "out"),
        bits=4.0,
        cal_rows=2,
        cal_cols=32,
        codebook=codebook,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "quantize_linear", stand_in_quantize)
        convert(options)
    return interop / "source" / source, interop / "quantized" / theirs, root / "out"


def test_every_tensor_has_the_same_name_dtype_and_shape(pair):
    _, theirs, ours = pair
    expected, found = (
        {n: m for n, m in TensorFiles(folder).inventory().items() if not n.startswith(VISION)}
        for folder in (theirs, ours)
    )
    assert found == expected


def test_markers_have_the_same_values(pair):
    _, theirs, ours = pair
    expected, found = TensorFiles(theirs), TensorFiles(ours)
    markers = [n for n in found.names() if n.endswith((".mul1", ".mcg"))]
    assert markers
    for name in markers:
        assert torch.equal(found.get(name), expected.get(name))


def test_the_same_files_are_there(pair):
    _, theirs, ours = pair
    assert folder_bytes(ours).keys() == folder_bytes(theirs).keys()


def test_side_files_are_copied_byte_for_byte(pair):
    source, _, ours = pair
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (ours / name).read_bytes() == (source / name).read_bytes()


def test_shards_carry_no_metadata(pair):
    _, theirs, ours = pair
    for folder in (theirs, ours):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert file.metadata() is None


def test_config_json_has_the_same_keys_in_the_same_order(pair):
    _, theirs, ours = pair
    expected, found = (json.loads((f / "config.json").read_text()) for f in (theirs, ours))
    assert shape_of(without_vision(found)) == shape_of(without_vision(expected))
    assert list(found) == list(expected)
    assert list(found["quantization_config"]) == [
        key for key in expected["quantization_config"] if key != "vision_bits"
    ]
    for key in found.keys() - {"quantization_config"}:
        assert found[key] == expected[key]


def test_quantization_config_json_has_the_same_entries(pair):
    _, theirs, ours = pair
    expected, found = (
        json.loads((folder / "quantization_config.json").read_text()) for folder in (theirs, ours)
    )
    assert list(found) == [key for key in expected if key != "vision_bits"]
    assert found["tensor_storage"] == expected["tensor_storage"]
    assert list(found["tensor_storage"]) == list(expected["tensor_storage"])


def test_settings_are_recorded_alike(pair):
    _, theirs, ours = pair
    expected, found = (
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (theirs, ours)
    )
    for key in ("quant_method", "bits", "head_bits", "out_scales", "codebook"):
        assert found[key] == expected[key]
        assert type(found[key]) is type(expected[key])
    assert found.get("mtp_bits") == expected.get("mtp_bits")


def test_the_vision_tower_stays_as_it_is_in_the_source(pair):
    source, _, ours = pair
    before, after = TensorFiles(source), TensorFiles(ours)
    names = {name for name in before.names() if name.startswith(VISION)}
    assert names == {name for name in after.names() if name.startswith(VISION)}
    for name in names:
        assert after.describe(name) == before.describe(name)
        assert torch.equal(after.get(name), before.get(name))


def test_what_is_not_quantized_keeps_its_bytes_and_dtype(pair):
    source, _, ours = pair
    before, after = TensorFiles(source), TensorFiles(ours)
    kept = {
        name
        for name in set(before.names()) & set(after.names())
        if not name.endswith(("in_proj_a.weight", "in_proj_b.weight", "bias"))
    }
    assert any("norm" in name for name in kept)
    for name in kept:
        assert after.describe(name) == before.describe(name)
        assert torch.equal(after.get(name), before.get(name))


def test_no_tensor_of_the_source_is_lost(pair):
    source, _, ours = pair
    found = set(TensorFiles(ours).names())
    for name in TensorFiles(source).names():
        key = name.rpartition(".")[0]
        assert name in found or f"{key}.trellis" in found


def test_the_result_is_a_model(pair):
    _, _, ours = pair
    model = Model.from_config(Config.from_directory(ours))
    model.load(device="cpu")
    logits = model.forward(torch.arange(8)[None], {})
    assert logits.shape == (1, 8, model.config.vocab_size)
    assert torch.isfinite(logits).all()


def without_vision(config: dict) -> dict:
    section = {k: v for k, v in config["quantization_config"].items() if k != "vision_bits"}
    return {**config, "quantization_config": section}


def shape_of(value: object) -> object:
    """Keys and types of a JSON value."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value]
    return type(value).__name__
