"""Jobs with parts that are not run: MTP heads and vision towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversion_support import (
    interrupt,
    job_options,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert
from safetensors.torch import save_file
from tiny_models import qwen35_config, random_tensors

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError

pytestmark = pytest.mark.usefixtures("stand_in")


def multimodal(tmp_path: Path, **changes) -> Path:
    """A text decoder under text_config, an MTP head and two vision tensors."""
    text = qwen35_config(mtp_num_hidden_layers=1)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "vision_config": {"depth": 1},
    }
    folder = tmp_path / "source"
    write_source(folder, {**text, "architectures": ["Qwen3_5ForCausalLM"]})
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    tensors = random_tensors_of(config)
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(6, 4).bfloat16()
    tensors["model.visual.pos_embed.weight"] = torch.randn(3, 3)
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_tensors_of(config: dict) -> dict[str, torch.Tensor]:
    tensors = random_tensors(config)
    if not any(name.startswith("mtp.") for name in tensors):
        # A configuration in memory has no files that could show an MTP head.
        hidden = config["text_config"]["hidden_size"]
        block = {
            name.replace("model.language_model.layers.1.", "mtp.layers.0."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith("model.language_model.layers.1.")
        }
        tensors |= block
        tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.zeros(hidden).bfloat16()
    return tensors


def test_mtp_linears_are_quantized_uncalibrated_at_their_own_rate(tmp_path):
    folder = multimodal(tmp_path)
    out = convert(job_options(folder, tmp_path, mtp_bits=5)).out_dir
    files = TensorFiles(out)
    assert files.describe("mtp.layers.0.self_attn.q_proj.trellis").shape[-1] == 16 * 5
    assert files.describe("mtp.fc.trellis").shape[-1] == 16 * 5
    section = json.loads((out / "quantization_config.json").read_text())
    assert section["mtp_bits"] == 5
    assert not any(key.startswith(("mtp.", "model.visual.")) for key in section["tensor_storage"])


def test_mtp_at_sixteen_bits_is_untouched(tmp_path):
    folder = multimodal(tmp_path)
    out = convert(job_options(folder, tmp_path, mtp_bits=16)).out_dir
    before, after = TensorFiles(folder), TensorFiles(out)
    for name in before.names():
        if name.startswith(("mtp.", "model.visual.")):
            assert after.describe(name) == before.describe(name)
            assert torch.equal(after.get(name), before.get(name))
    assert "mtp_bits" not in json.loads((out / "quantization_config.json").read_text())


def test_mtp_bits_cannot_change_once_a_part_of_the_head_is_finished(tmp_path):
    options = job_options(multimodal(tmp_path), tmp_path)
    interrupt(options, "shard tensor", 1)
    with pytest.raises(ConversionError, match="-mb cannot change any more, mtp"):
        ConversionJob.resume(options.work_dir, {"mtp_bits": 3})
