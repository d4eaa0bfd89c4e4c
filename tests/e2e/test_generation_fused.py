"""Generation from a checkpoint that declares a topology: one block fused, one split."""

import json

import pytest
import torch
from fake_model import byte_tokenizer, run_jobs
from tiny_models import load_model, qwen35_config, random_exl3, random_tensors, write_folder

from exllamav3 import Cache, Config, Generator, Job, Model
from exllamav3.cli.main import main
from exllamav3.generator import GreedySampler
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

LAYERS = ("model.layers.1.self_attn", "model.layers.2.self_attn")
SPLITS = (256, 64, 64)
TOPOLOGY = ResolvedTopology(
    (
        TopologyRow(LAYERS[0], SPLITS, (Projection("qkv_proj", 4, "mcg", "always"),)),
        TopologyRow(
            LAYERS[1],
            SPLITS,
            (
                Projection("q_proj", 3, "mul1", "always"),
                Projection("k_proj", 6, "mul1", "always"),
                Projection("v_proj", 5, "mcg", "always"),
            ),
        ),
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with random weights."""
    kinds = ["linear_attention", "full_attention", "full_attention"]
    changes = {"num_hidden_layers": 3, "layer_types": kinds, "max_position_embeddings": 512}
    config = qwen35_config() | changes

    def quantize(linear):
        declared = TOPOLOGY.projection(linear.key)
        bits, codebook = (declared.bits, declared.codebook) if declared else (4, "mul1")
        return random_exl3(
            linear.key, linear.in_features, linear.out_features, bits=bits, codebook=codebook
        )

    tensors = random_tensors(config, topology=TOPOLOGY, quantize=quantize)
    quantization = {
        "quant_method": "exl3",
        "version": "1",
        "bits": 4.0,
        "head_bits": 4,
        "exl3_qkv_topology": TOPOLOGY.to_obj(),
    }
    path = tmp_path_factory.mktemp("fused") / "model"
    write_folder(path, config | {"quantization_config": quantization}, tensors)
    return path


def test_batched_generation_through_fused_and_split_blocks_equals_uncached_passes(folder, device):
    model = load_model(folder, device)
    generator = Generator(
        model, Cache(model, max_num_tokens=2048), byte_tokenizer(), max_chunk_size=100
    )
    lengths = (5, 270, 1)
    prompts = [[(7 * i + n) % 120 + 2 for i in range(n)] for n in lengths]
    jobs = [
        Job(prompt, 12, sampler=GreedySampler(), ignore_eos=True, identifier=index)
        for index, prompt in enumerate(prompts)
    ]
    tokens, _ = run_jobs(generator, jobs)
    fused, split = (model.routes()[layer] for layer in LAYERS)
    assert set(fused) == {"fused"}
    # On a GPU a decode step groups the three; a piece of a prompt has too many rows for that.
    assert set(split) == ({"split"} if device == "cpu" else {"split", "grouped"})
    assert sum(fused.values()) == sum(split.values()) > 0
    for index, prompt in enumerate(prompts):
        logits = model.forward(torch.tensor([prompt + tokens[index]]), {})[0]
        logits = logits[len(prompt) - 1 : -1].cpu()
        chosen = logits.gather(1, torch.tensor(tokens[index])[:, None])[:, 0]
        # Float16 activations: sums in another order may swap two likeliest tokens that are equal
        # but for rounding.
        tolerance = 0 if device == "cpu" else 0.02 * float(logits.std())
        assert float((logits.max(-1).values - chosen).max()) <= tolerance


def test_inspection_shows_the_declared_topology(folder, capsys):
    assert main(["inspect", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["topology"] == TOPOLOGY.to_obj()
    assert "exl3_qkv_topology" not in report["quantization"]
    declared = {w["key"]: (w["topology"], w["K"], w["codebook"]) for w in report["weights"]}
    assert declared[f"{LAYERS[0]}.qkv_proj"] == ("fused_uniform", 4, "mcg")
    assert declared[f"{LAYERS[1]}.q_proj"] == ("split", 3, "mul1")
    assert declared[f"{LAYERS[1]}.k_proj"] == ("split", 6, "mul1")
    assert declared[f"{LAYERS[1]}.v_proj"] == ("split", 5, "mcg")
    assert declared[f"{LAYERS[0]}.o_proj"] == (None, 4, "mul1")


def test_a_cache_can_be_made_before_the_model_is_loaded(folder):
    model = Model.from_config(Config.from_directory(folder))
    cache = Cache(model, max_num_tokens=256)
    model.load(device="cpu")
    generator = Generator(model=model, cache=cache, tokenizer=byte_tokenizer())
    tokens, _ = run_jobs(generator, [Job([5, 6], 3, identifier=0, seed=0, ignore_eos=True)])
    assert len(tokens[0]) == 3
