"""Conversion with the real quantizer: the result behaves like its source, split or fused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conversion_support import CALIBRATION, folder_bytes, job_options, write_source
from exllamav3.conversion import ConversionJob, convert
from tiny_models import llama_config, load_model, qwen35_config, relative_error

from exllamav3 import Cache, Generator, Tokenizer
from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.codec.tensor import Exl3Tensor
from exllamav3.evaluation import evaluate

LLAMA = llama_config(intermediate_size=128, vocab_size=128)
QWEN35 = qwen35_config()
IDS = torch.arange(48).reshape(2, 24) * 5 % 128


def plan_for(root: Path, layer: str, bits: int, codebook: str = "mul1") -> str:
    root.mkdir(parents=True, exist_ok=True)
    row = {
        "layer": layer, "variant": "fused_uniform", "K": bits, "codebook": codebook,
        "scale": "always",
    }  # fmt: skip
    path = root / "plan.json"
    path.write_text(json.dumps({"schema": "exl3_qkv_topology/1", "layers": [row]}))
    return str(path)


class Case:
    """A source, and its conversions at six bits: all split, and with one fused block."""

    def __init__(self, root: Path, config: dict, layer: str) -> None:
        self.source = write_source(root / "source", config)
        self.layer = layer
        self.results = {}
        for name in ("split", "fused"):
            options = job_options(self.source, root / name, bits=6.0, head_bits=6)
            plan = plan_for(root / name, layer, 6) if name == "fused" else None
            self.results[name] = convert(options, plan)

    def model(self, name: str):
        return load_model(self.source if name == "source" else self.results[name].out_dir)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((LLAMA, "model.layers.0.self_attn"), id="llama"),
        pytest.param((QWEN35, "model.layers.1.self_attn"), id="qwen3.5"),
    ],
)
def case(request, tmp_path_factory) -> Case:
    return Case(tmp_path_factory.mktemp("quality"), *request.param)


@pytest.mark.parametrize("name", ["split", "fused"])
def test_logits_stay_close_to_those_of_the_source(case, name):
    expected, found = (case.model(which).forward(IDS, {}) for which in ("source", name))
    # Random weights at 6 bits: each linear is off by about 1 %, two blocks and a head add up.
    assert relative_error(found, expected) < 0.08


@pytest.mark.parametrize("name", ["split", "fused"])
def test_distributions_stay_close_to_those_of_the_source(case, name):
    result = evaluate(case.model(name), IDS, case.model("source"))
    assert result.kl < 0.01
    assert result.top1_agreement > 0.85


@pytest.mark.parametrize("name", ["split", "fused"])
def test_the_declared_route_is_taken(case, name):
    model = case.model(name)
    model.forward(IDS, {})
    assert dict(model.routes()[case.layer]) == {name: 1}


@pytest.mark.parametrize("name", ["split", "fused"])
def test_every_linear_is_calibrated_and_accurate(case, name):
    reports = [linear for module in case.results[name].modules for linear in module.linears]
    assert reports
    for linear in reports:
        assert not linear.fallback
        assert linear.proxy_error is not None
        assert linear.proxy_error < 5e-4  # 6 bits: the codebook alone gives about 3e-4


def test_fusing_costs_little(case):
    source = case.model("source").forward(IDS, {})
    split, fused = (
        relative_error(case.model(name).forward(IDS, {}), source) for name in ("split", "fused")
    )
    assert fused < 1.5 * split


def test_the_fused_weight_decodes_to_q_k_and_v(case):
    files, before = (TensorFiles(f) for f in (case.results["fused"].out_dir, case.source))
    key = f"{case.layer}.qkv_proj"
    tensors = {n: files.get(n) for n in files.names() if n.startswith(f"{key}.")}
    decoded = Exl3Tensor.from_tensors(key, tensors).reconstruct()
    start = 0
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = before.get(f"{case.layer}.{name}.weight").float().T
        part = decoded[: weight.shape[0], start : start + weight.shape[1]]
        assert relative_error(part, weight) < 0.05
        start += weight.shape[1]


@pytest.mark.parametrize("name", ["split", "fused"])
def test_cached_generation_continues_like_the_uncached_forward(case, name):
    model = case.model(name)
    cache = Cache(model, max_num_tokens=256)
    ids = IDS[:1, :7]
    params = {"attn_mode": "flash_attn", "cache": cache, "past_len": 0, "batch_shape": (1, 256)}
    made = []
    for _ in range(5):
        logits = model.forward(ids[:, params["past_len"] :], params)
        params["past_len"] = ids.shape[1]
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        made.append(int(ids[0, -1]))
    whole = model.forward(ids[:, :-1], {})[0].argmax(-1)
    assert whole[-5:].tolist() == made


def test_a_killed_job_resumes_to_the_same_bytes_with_the_real_quantizer(case, tmp_path):
    options = job_options(case.source, tmp_path, bits=6.0, head_bits=6)

    def stop(name: str) -> None:
        seen.append(name)
        if seen.count("module tensor") == 3:
            raise KeyboardInterrupt

    seen: list[str] = []
    plan = plan_for(tmp_path, case.layer, 6)
    with ConversionJob.create(options, plan, step=stop) as job, pytest.raises(KeyboardInterrupt):
        job.run()
    with ConversionJob.resume(options.work_dir) as job:
        made = job.run().out_dir
    assert folder_bytes(made) == folder_bytes(case.results["fused"].out_dir)


def test_a_text_model_calibrates_on_the_bundled_text_and_generates(data_dir, tmp_path):
    """With the model's own tokenizer; two of the four widths are cut short to save time."""
    source = data_dir / "interop" / "source" / "tiny-llama"
    config = llama_config(vocab_size=512, intermediate_size=128)
    folder = write_source(tmp_path / "source", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    options = job_options(folder, tmp_path, cal_data=None, cal_rows=4, cal_cols=64)
    out = convert(options).out_dir
    model = load_model(out)
    generator = Generator(
        model=model,
        cache=Cache(model, max_num_tokens=256),
        tokenizer=Tokenizer.from_directory(out),
    )
    text = generator.generate(prompt="It is a truth", max_new_tokens=8, seed=1)
    assert text.startswith("It is a truth")
    assert (tmp_path / CALIBRATION).exists()
