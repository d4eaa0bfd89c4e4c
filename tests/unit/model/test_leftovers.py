"""Tensors that no module reads: known ones pass, others are named, contradictory ones stop it."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import (
    llama_config,
    load_model,
    qwen35_config,
    random_exl3,
    random_tensors,
    write_folder,
)

from exllamav3.checkpoint.tensor_files import CheckpointWarning
from exllamav3.cli.main import main
from exllamav3.errors import FormatError
from exllamav3.model.config import Config
from exllamav3.model.model import Model
from exllamav3.modules.module import DictSource

ATTENTION = "model.layers.0.self_attn"
EXL3 = {"quant_method": "exl3", "version": "0.1.0", "bits": 4.0}


class Unreadable(DictSource):
    """Names and headers only."""

    def get(self, name):
        pytest.fail(f"{name} was read")


def quantized(linear):
    return random_exl3(linear.key, linear.in_features, linear.out_features)


def load(config, tensors, source=DictSource):
    Model.from_config(Config(config)).load(device="cpu", source=source(tensors))


@pytest.mark.parametrize("quantize", [None, quantized])
@pytest.mark.parametrize(
    "name",
    [
        f"{ATTENTION}.q_proj.bias",
        f"{ATTENTION}.q_proj.weight_scale_inv",
        f"{ATTENTION}.qkv_proj.weight",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.1.input_layernorm.bias",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_tensor_that_a_running_layer_ignores_is_an_error_before_anything_is_read(quantize, name):
    tensors = random_tensors(llama_config(), quantize=quantize) | {name: torch.ones(128)}
    with pytest.raises(FormatError, match=rf"1 tensor \({name}\) would be ignored"):
        load(llama_config(), tensors, Unreadable)


def test_a_second_form_of_a_weight_is_an_error():
    key = f"{ATTENTION}.q_proj"
    dense = random_tensors(llama_config())
    group = random_exl3(key, 128, 128)
    with pytest.raises(FormatError, match=r"1 tensor \(.*q_proj\.weight\) would be ignored"):
        load(llama_config(), dense | group, Unreadable)
    del group[f"{key}.suh"]
    with pytest.raises(FormatError, match=r"3 tensors \(.*mul1, .*svh, .*trellis\)"):
        load(llama_config(), dense | group, Unreadable)


def test_the_convolution_of_a_delta_net_has_no_bias():
    tensors = random_tensors(qwen35_config())
    tensors["model.layers.0.linear_attn.conv1d.bias"] = torch.ones(256)
    with pytest.raises(FormatError, match=r"conv1d\.bias\) would be ignored"):
        load(qwen35_config(), tensors)


def test_unknown_tensors_are_named_and_counted_and_the_model_loads(tmp_path):
    extra = {f"model.extra.{number}.weight": torch.ones(2) for number in range(8)}
    extra[f"{ATTENTION}.k_scale"] = torch.ones(1)
    folder = write_folder(tmp_path, llama_config(), random_tensors(llama_config()) | extra)
    with pytest.warns(CheckpointWarning) as caught:
        model = load_model(folder)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert message.startswith(f"{folder}: 9 tensors (model.extra.0.weight, ")
    assert "..." in message
    assert message.count("weight") == 6
    assert model.forward(torch.tensor([[1, 2]])).isfinite().all()


@pytest.mark.parametrize(
    "names",
    [
        [f"{ATTENTION}.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"],
        ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"],
    ],
)
@pytest.mark.parametrize("changes", [{}, {"quantization_config": EXL3}])
def test_known_tensors_that_do_not_run_are_silent(tmp_path, names, changes):
    tensors = random_tensors(qwen35_config()) | {name: torch.ones(4) for name in names}
    folder = write_folder(tmp_path, qwen35_config(**changes), tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder)


def test_the_vision_tower_is_silent(data_dir):
    for kind in ("source/tiny-qwen35-vl", "quantized/tiny-qwen35-vl-4bpw-mul1-always"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_model(data_dir / "interop" / kind)


def test_the_command_line_says_what_is_ignored(tmp_path, example_model, capsys):
    tensors = load_file(example_model / "model.safetensors") | {"stray": torch.ones(1)}
    write_folder(tmp_path, json.loads((example_model / "config.json").read_text()), tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((example_model / name).read_bytes())
    assert main(["generate", str(tmp_path), "The king", "-n", "1", "--greedy"]) == 0
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"warning: {tmp_path}: 1 tensor (stray) ignored")


def test_linears_that_lost_their_marker_are_named(tmp_path):
    tensors = random_tensors(llama_config(), quantize=quantized)
    del tensors[f"{ATTENTION}.q_proj.mul1"]
    config = llama_config(quantization_config=EXL3 | {"codebook": "mul1"})
    folder = write_folder(tmp_path, config, tensors)
    with pytest.warns(CheckpointWarning, match=rf"1 linear \({ATTENTION}\.q_proj\): read as 3inst"):
        load_model(folder)


@pytest.mark.parametrize("codebook", [None, "3inst"])
def test_a_checkpoint_of_3inst_is_not_doubted(tmp_path, codebook):
    def quantize(linear):
        return random_exl3(linear.key, linear.in_features, linear.out_features, codebook="3inst")

    section = EXL3 | ({"codebook": codebook} if codebook else {})
    config = llama_config(quantization_config=section)
    folder = write_folder(tmp_path, config, random_tensors(config, quantize=quantize))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder)


def test_the_missing_part_of_a_quantized_weight_is_named():
    tensors = random_tensors(llama_config(), quantize=quantized)
    del tensors[f"{ATTENTION}.q_proj.suh"]
    with pytest.raises(FormatError, match=rf"1 tensors .* missing: {ATTENTION}\.q_proj\.suh"):
        load(llama_config(), tensors, Unreadable)


def test_scales_of_two_forms_are_an_error():
    tensors = random_tensors(llama_config(), quantize=quantized)
    tensors[f"{ATTENTION}.q_proj.su"] = torch.zeros(8, dtype=torch.int16)
    with pytest.raises(FormatError, match=r"q_proj has both suh and su"):
        load(llama_config(), tensors)
