"""One attention block of the real size of a 27 B Qwen3.5, converted, loaded and run."""

from __future__ import annotations

import json

import pytest
import torch
from conversion_support import job_options, stand_in_quantize, write_source
from exllamav3.conversion import convert, pipeline
from tiny_models import load_model, qwen35_config

from exllamav3.checkpoint.tensor_files import TensorFiles

LAYER = "model.layers.0.self_attn"
SPLITS = [12288, 1024, 1024]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("quantizer", ["stand-in", "real"])
def test_a_fused_block_of_the_real_geometry(tmp_path, monkeypatch, quantizer):
    """Hidden 5120, 24 query heads with gate, 4 key/value heads of 256; the MLP is a stub."""
    if quantizer == "stand-in":
        monkeypatch.setattr(pipeline, "quantize_linear", stand_in_quantize)
    config = qwen35_config()
    config |= {
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "intermediate_size": 128,
    }
    source = write_source(tmp_path / "source", config)
    plan = tmp_path / "plan.json"
    row = {
        "layer": LAYER, "variant": "fused_uniform", "K": 4, "codebook": "mul1", "scale": "always",
    }  # fmt: skip
    plan.write_text(json.dumps({"schema": "exl3_qkv_topology/1", "layers": [row]}))
    options = job_options(source, tmp_path, bits=4.0, cal_rows=12, cal_cols=24)
    out = convert(options, str(plan)).out_dir

    declared = json.loads((out / "config.json").read_text())["quantization_config"]
    (declared_row,) = declared["exl3_qkv_topology"]["layers"]
    assert declared_row["output_splits"] == SPLITS
    files = TensorFiles(out)
    assert files.describe(f"{LAYER}.qkv_proj.trellis").shape == (320, 896, 64)
    assert files.describe(f"{LAYER}.qkv_proj.svh").shape == (14336,)

    ids = torch.arange(6)[None]
    model = load_model(out)
    logits = model.forward(ids, {})
    assert {key: dict(taken) for key, taken in model.routes().items()} == {LAYER: {"fused": 1}}
    assert torch.isfinite(logits).all()
    if quantizer == "real":
        exact = load_model(source).forward(ids, {})
        assert (logits - exact).norm() / exact.norm() < 0.25
