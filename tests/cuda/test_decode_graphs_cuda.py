"""Captured decode steps: the same bits as uncaptured ones, without waiting or allocating."""

import pytest
import torch
from fake_model import byte_tokenizer, run_jobs
from tiny_models import (
    llama_config,
    load_model,
    qwen35_config,
    random_exl3,
    random_tensors,
    write_folder,
)

from exllamav3 import Cache, Generator, Job
from exllamav3.generator import GreedySampler
from exllamav3.generator.decode_graphs import DecodeGraphs

pytestmark = pytest.mark.cuda


def quantize(linear):
    return random_exl3(linear.key, linear.in_features, linear.out_features)


@pytest.fixture(params=["llama", "qwen3.5", "quantized cache"])
def parts(request, tmp_path):
    """A quantized model on the GPU and options of its cache."""
    config = llama_config() if request.param == "llama" else qwen35_config()
    config["max_position_embeddings"] = 2048
    folder = write_folder(tmp_path, config, random_tensors(config, quantize=quantize))
    bits = {"k_bits": 8, "v_bits": 6} if request.param == "quantized cache" else {}
    return load_model(folder, "cuda"), bits


def jobs():
    lengths = {"short": (3, 20), "crosses a page": (250, 12), "long": (700, 6), "one": (1, 2)}
    return [
        Job(
            [(7 * i + n) % 120 + 2 for i in range(n)],
            new,
            sampler=GreedySampler(),
            ignore_eos=True,
            identifier=name,
        )
        for name, (n, new) in lengths.items()
    ]


def generator_of(parts, **options):
    model, bits = parts
    return Generator(model, Cache(model, 2048, **bits), byte_tokenizer(), **options)


def test_a_generator_replays_graphs_and_gives_the_tokens_of_eager_steps(parts):
    generator = generator_of(parts)
    tokens, _ = run_jobs(generator, jobs())
    assert generator._graphs is not None
    assert len(generator._graphs.shapes) >= 3
    eager, _ = run_jobs(generator_of(parts, cuda_graphs=False), jobs())
    assert tokens == eager


def steps(parts, capture, count=6):
    """Logits of some steps of three sequences, and the object that made them."""
    model, bits = parts
    cache = Cache(model, 4096, **bits)
    sequences = [cache.new_sequence(600) for _ in range(3)]
    for row, sequence in enumerate(sequences):
        prompt = torch.arange(2, 10 + 123 * row)[None] % 120  # 8, 131 and 254 tokens
        model.forward(prompt, {"cache": cache, "sequences": [sequence]})
        sequence.length = prompt.shape[1]
    graphs = DecodeGraphs(model, cache, "cuda", capture)
    logits = []
    for step in range(count):
        ids = torch.tensor([[5 + step], [50 + step], [100 - step]])
        logits.append(graphs.step(sequences, ids).clone())
        for sequence in sequences:
            sequence.length += 1
    return torch.stack(logits), graphs, sequences


def test_replayed_steps_are_uncaptured_ones_bit_for_bit(parts):
    captured, _, _ = steps(parts, capture=True)
    plain, _, _ = steps(parts, capture=False)
    assert captured.isfinite().all()
    assert torch.equal(captured, plain)


def test_a_replayed_step_neither_waits_nor_allocates(parts):
    _, graphs, sequences = steps(parts, capture=True, count=4)  # into the second page
    ids = torch.tensor([[1], [2], [3]])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graphs.step(sequences, ids)
            for sequence in sequences:
                sequence.length += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
