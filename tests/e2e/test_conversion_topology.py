"""Jobs with a QKV topology plan: payloads, declarations, routes."""

from __future__ import annotations

import json

import pytest
import torch
from conversion_support import (
    CALIBRATION,
    job_options,
    stand_in_quantize,
    write_source,
)
from exllamav3.conversion import convert, pipeline
from plan_support import KEY, LAYER_0, LAYER_1, converted, fused, mixed, plan_file
from safetensors.torch import load_file
from tiny_models import llama_config, load_model, qwen35_config

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.modules.context import ForwardContext
from exllamav3.topology import check_copies, parse_declaration

pytestmark = pytest.mark.usefixtures("stand_in")


def test_a_fused_block_is_one_payload_and_a_mixed_block_is_three(source, tmp_path):
    files = TensorFiles(converted(source, tmp_path, fused(), mixed()))
    names = files.names()
    # q 128, k 64 and v 64 wide: 256 together, padded once.
    assert files.describe(f"{LAYER_0}.qkv_proj.trellis").shape == (8, 16, 80)
    assert files.describe(f"{LAYER_0}.qkv_proj.svh").shape == (256,)
    assert not any(f"{LAYER_0}.{p}_proj.trellis" in names for p in "qkv")
    assert f"{LAYER_0}.qkv_proj.mcg" in names
    for p, bits, marker in (("q", 4, "mul1"), ("k", 6, "mul1"), ("v", 3, "mcg")):
        assert files.describe(f"{LAYER_1}.{p}_proj.trellis").shape[-1] == 16 * bits
        assert f"{LAYER_1}.{p}_proj.{marker}" in names
    assert not any(name.startswith(f"{LAYER_1}.qkv_proj") for name in names)


def test_a_plan_changes_no_other_tensor_of_the_first_block(source, tmp_path):
    """Later blocks see other activations; before the plan's own block nothing may differ."""
    plain = TensorFiles(convert(job_options(source, tmp_path / "plain")).out_dir)
    planned = TensorFiles(converted(source, tmp_path / "plan", fused(LAYER_1)))
    for name in plain.names():
        if not name.startswith(("model.layers.1.", "lm_head")):
            assert torch.equal(plain.get(name), planned.get(name)), name


def test_the_declaration_is_stored_in_all_four_places(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=4200))
    out = converted(folder, tmp_path, fused(), shard_size=1)
    files = TensorFiles(out)
    assert len(files.headers) == 2
    declared = json.loads((out / "config.json").read_text())["quantization_config"][KEY]
    index = json.loads((out / "model.safetensors.index.json").read_text())["metadata"][KEY]
    other = json.loads((out / "quantization_config.json").read_text())[KEY]
    compact = json.dumps(declared, sort_keys=True, separators=(",", ":"))
    assert declared == index == other
    for header in files.headers.values():
        assert header.metadata[KEY] == compact
    copies = {name: header.metadata[KEY] for name, header in files.headers.items()}
    check_copies(parse_declaration(declared, "config.json"), copies, required=True)


def test_the_declaration_has_a_row_for_every_full_attention_block(source, tmp_path):
    out = converted(source, tmp_path, fused())
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section[KEY]["layers"] == [
        {
            "layer": LAYER_0,
            "variant": "fused_uniform",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [128, 64, 64],
            "projection": {"name": "qkv_proj", "K": 5, "codebook": "mcg", "scale": "never"},
        },
        {
            "layer": LAYER_1,
            "variant": "split",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [128, 64, 64],
            "projections": [
                {"name": f"{p}_proj", "K": 3, "codebook": "mul1", "scale": "always"} for p in "qkv"
            ],
        },
    ]


def test_an_empty_plan_declares_every_block_split_and_changes_no_tensor(source, tmp_path):
    out = converted(source, tmp_path / "plan")
    plain = convert(job_options(source, tmp_path / "plain")).out_dir
    rows = json.loads((out / "config.json").read_text())["quantization_config"][KEY]["layers"]
    assert [row["variant"] for row in rows] == ["split", "split"]
    one, two = TensorFiles(plain), TensorFiles(out)
    assert one.inventory() == two.inventory()
    assert all(torch.equal(one.get(name), two.get(name)) for name in one.names())


def test_tensor_storage_describes_declared_payloads(source, tmp_path):
    out = converted(source, tmp_path, fused(), mixed())
    storage = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    entry = storage[f"{LAYER_0}.qkv_proj"]
    assert entry["codebook"] == "mcg"
    assert entry["scale"] == "never"
    assert entry["components"] == ["q_proj", "k_proj", "v_proj"]
    assert entry["output_splits"] == [128, 64, 64]
    assert entry["bits_per_weight"] == 5
    assert f"{LAYER_0}.q_proj" not in storage
    assert storage[f"{LAYER_1}.k_proj"]["scale"] == "auto"
    assert storage[f"{LAYER_1}.v_proj"]["codebook"] == "mcg"
    assert "codebook" not in storage[f"{LAYER_0}.o_proj"]


def test_the_achieved_bits_count_the_fused_matrix(source, tmp_path):
    plan = plan_file(tmp_path, fused(bits=8))
    result = convert(job_options(source, tmp_path), plan)
    # Per block: fused 128x256, o 128x128, three MLP matrices of 128x128; k and v of the
    # split block are padded to 128 columns each.
    fused_block = 2 * 8 + 4 * 3
    split_block = 3 * 3 + 4 * 3
    expected = (fused_block + split_block) / (6 + 7)
    assert result.mean_bits == pytest.approx(expected)
    section = json.loads((result.out_dir / "config.json").read_text())["quantization_config"]
    assert section["bits"] == round(expected, 2)


def test_the_fused_weight_is_the_bf16_concatenation_and_keeps_the_input_hessian(
    source, tmp_path, monkeypatch
):
    seen = {}

    def record(weight_KN, hessian, settings, bias_N=None, progress=None):
        seen[tuple(weight_KN.shape), settings.bits] = (weight_KN.clone(), hessian)
        return stand_in_quantize(weight_KN, hessian, settings, bias_N, progress)

    monkeypatch.setattr(pipeline, "quantize_linear", record)
    converted(source, tmp_path, fused(bits=7))
    weight_KN, hessian = seen[(128, 256), 7]
    assert weight_KN.dtype == torch.bfloat16
    before = load_file(source / "model.safetensors")
    parts = weight_KN.T.split([128, 64, 64])
    for part, p in zip(parts, "qkv", strict=True):
        assert torch.equal(part, before[f"{LAYER_0}.{p}_proj.weight"])
    assert hessian is not None
    assert hessian.count == 6 * 16


def test_the_state_behind_a_fused_block_is_that_of_the_model_as_it_loads(source, tmp_path):
    """The Hessian of the next block must come from the fused block, on every device."""
    hessians = {}

    def record(label):
        def quantize(weight_KN, hessian, settings, bias_N=None, progress=None):
            hessians.setdefault(label, []).append(hessian.matrix.clone())
            return stand_in_quantize(weight_KN, hessian, settings, bias_N, progress)

        return quantize

    outs = {}
    for devices in (("cpu",), ("cpu", "cpu")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "quantize_linear", record(len(devices)))
            root = tmp_path / str(len(devices))
            outs[len(devices)] = converted(source, root, fused(), devices=devices)
    model = load_model(outs[1])
    ids = load_file(source.parent / CALIBRATION)["input_ids"][:6, :16]
    ctx = ForwardContext.uncached(6, 16)
    with torch.no_grad():
        x = model.modules[1].forward(model.modules[0].forward(ids, ctx), ctx)
        assert dict(model.routes()[LAYER_0]) == {"fused": 1}
        x = model.modules[2].attn_norm.forward(x, ctx).reshape(-1, 128)
    expected = x.T @ x / x.shape[0]
    # Calls of block 0: fused, o, up, gate, down; the sixth is q of block 1.
    assert torch.allclose(hessians[1][5], expected, rtol=1e-3, atol=1e-4)
    assert torch.allclose(hessians[2][0], hessians[1][0], rtol=1e-3, atol=1e-4)


def test_the_result_takes_the_declared_routes(tmp_path):
    config = qwen35_config(num_hidden_layers=3)
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    folder = write_source(tmp_path / "source", config)
    split = {"layer": "model.layers.2.self_attn", "variant": "split"}
    model = load_model(converted(folder, tmp_path, fused(), split))
    logits = model.forward(torch.arange(9)[None], {})
    assert torch.isfinite(logits).all()
    assert {key: dict(routes) for key, routes in model.routes().items()} == {
        LAYER_0: {"fused": 1},
        "model.layers.2.self_attn": {"split": 1},
    }


def test_biases_are_concatenated_and_padded_once(tmp_path):
    config = llama_config(architectures=["Qwen2ForCausalLM"], head_dim=32, intermediate_size=128)
    folder = write_source(tmp_path / "source", config)
    files = TensorFiles(converted(folder, tmp_path, fused()))
    before = load_file(folder / "model.safetensors")
    bias = files.get(f"{LAYER_0}.qkv_proj.bias")
    assert bias.dtype == torch.float16
    assert bias.shape == (128,)  # 64 + 32 + 32
    expected = torch.cat([before[f"{LAYER_0}.{p}_proj.bias"] for p in "qkv"]).half()
    assert torch.equal(bias, expected)


def test_widths_that_are_no_multiples_of_128_are_padded_after_concatenation(tmp_path):
    config = llama_config(
        hidden_size=192, head_dim=64, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=320,
    )  # fmt: skip
    folder = write_source(tmp_path / "source", config)
    out = converted(folder, tmp_path, fused())
    files = TensorFiles(out)
    assert files.describe(f"{LAYER_0}.qkv_proj.trellis").shape == (16, 24, 80)  # 320 -> 384
    assert files.describe(f"{LAYER_1}.k_proj.trellis").shape == (16, 8, 48)
    logits = load_model(out).forward(torch.arange(5)[None], {})
    assert logits.shape == (1, 5, 130)
    assert torch.isfinite(logits).all()
