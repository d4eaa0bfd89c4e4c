"""Decode steps of constant shape: the same tokens as steps of growing shape."""

import pytest
import torch
from fake_model import FakeModel, byte_tokenizer, greedy_uncached, run_jobs

from exllamav3 import Cache, Generator, Job
from exllamav3.errors import UnsupportedError
from exllamav3.generator import GreedySampler
from exllamav3.generator.decode_graphs import DecodeGraphs


def constant_shape_generator(model, **options):
    cache = Cache(model, max_num_tokens=4096)
    generator = Generator(model, cache, byte_tokenizer(), **options)
    generator._graphs = DecodeGraphs(model, cache, "cpu", capture=False)
    return generator


def test_jobs_that_come_and_go_get_the_tokens_of_uncached_passes():
    model = FakeModel()
    generator = constant_shape_generator(model)
    lengths = {"short": (3, 20), "crosses a page": (250, 30), "long": (700, 5), "one": (1, 2)}
    prompts = {name: [(5 * i + n) % 250 + 2 for i in range(n)] for name, (n, _) in lengths.items()}
    jobs = [
        Job(prompts[name], new, sampler=GreedySampler(), ignore_eos=True, identifier=name)
        for name, (_, new) in lengths.items()
    ]
    tokens, _ = run_jobs(generator, jobs)
    for name, (_, new) in lengths.items():
        assert tokens[name] == greedy_uncached(model, prompts[name], new), name


def test_a_step_reads_a_power_of_two_of_pages_and_shapes_are_reused():
    model = FakeModel()
    cache = Cache(model, max_num_tokens=256 * 6)
    graphs = DecodeGraphs(model, cache, "cpu", capture=False)
    sequence = cache.new_sequence(256 * 6)
    for length in (0, 255, 256, 511, 512, 1023, 1024, 1535):
        sequence.length = length
        graphs.step([sequence], torch.tensor([[7]]))
    assert graphs.shapes == [(1, 1), (1, 2), (1, 4), (1, 6)]  # the cache has no more than 6 pages


def test_graphs_on_the_cpu_are_refused():
    model = FakeModel()
    with pytest.raises(UnsupportedError, match="GPU"):
        Generator(model, Cache(model, 256), byte_tokenizer(), cuda_graphs=True)
