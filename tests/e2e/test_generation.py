"""Cached, batched and chunked generation against plain uncached passes of real tiny models."""

from pathlib import Path

import pytest
import torch
from fake_model import run_jobs

from exllamav3 import Cache, Config, Generator, Model, Tokenizer
from exllamav3.generator import CategoricalSampler, GreedySampler, Job

ROOT = Path(__file__).parents[2]
MODELS = {
    "trained-qwen35": ROOT / "examples/tiny-qwen35-lm",
    "llama": ROOT / "tests/data/interop/source/tiny-llama",
    "llama-quantized": ROOT / "tests/data/interop/quantized/tiny-llama-4bpw-mul1-always",
    "qwen35-quantized": ROOT / "tests/data/interop/quantized/tiny-qwen35-vl-4bpw-mul1-always",
}
PROMPTS = ["The king", "And", "In the beginning God created the heaven and the earth. " * 8, "x"]
NEW_TOKENS = 16


@pytest.fixture(scope="module", params=MODELS)
def parts(request):
    """A loaded model and its tokenizer."""
    config = Config.from_directory(MODELS[request.param])
    model = Model.from_config(config)
    model.load(device="cpu")
    return model, Tokenizer.from_config(config)


def generator_of(parts, **options):
    model, tokenizer = parts
    return Generator(model, Cache(model, max_num_tokens=2048), tokenizer, **options)


def greedy_jobs(tokenizer):
    return [
        Job(
            tokenizer.encode(text),
            NEW_TOKENS,
            sampler=GreedySampler(),
            ignore_eos=True,
            identifier=index,
        )
        for index, text in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("chunk", [7, 2048])
def test_a_batch_of_unequal_prompts_gives_the_tokens_of_uncached_passes(parts, chunk):
    model, tokenizer = parts
    tokens, _ = run_jobs(generator_of(parts, max_chunk_size=chunk), greedy_jobs(tokenizer))
    for index, text in enumerate(PROMPTS):
        assert len(tokens[index]) == NEW_TOKENS
        assert tokens[index] == greedy_choices(model, tokenizer.encode_ids(text), tokens[index])


def greedy_choices(model, prompt, completion):
    """What an uncached pass would choose after the prompt and after each token of a completion.

    Equal to the completion only if repeated uncached passes would yield it token for token.
    """
    logits = model.forward(torch.tensor([prompt + completion]), {})[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def cached_logits(model, ids, chunk):
    """All logits of one sequence that passes the cache in chunks."""
    cache = Cache(model, max_num_tokens=512)
    sequence, parts = cache.new_sequence(ids.shape[1]), []
    for piece in ids.split(chunk, dim=1):
        params = {
            "cache": cache,
            "sequences": [sequence],
            "cache_seqlens": torch.tensor([sequence.length]),
        }
        parts.append(model.forward(piece, params))
        sequence.length += piece.shape[1]
    return torch.cat(parts, dim=1)


def test_chunked_prefill_gives_the_logits_of_one_uncached_pass(parts):
    model, _ = parts
    ids = torch.randint(2, 500, (1, 300), generator=torch.Generator().manual_seed(0))
    expected = model.forward(ids, {})
    for chunk in (300, 64, 9):
        logits = cached_logits(model, ids, chunk)
        # float32 sums in another order: a few times 1e-7 relative, times layers.
        assert (logits - expected).norm() <= 1e-4 * expected.norm(), f"chunks of {chunk}"


def test_padded_prompts_in_one_pass_give_the_logits_of_each_alone(parts):
    model, tokenizer = parts
    rows = [tokenizer.encode(text) for text in PROMPTS]
    lengths = torch.tensor([row.shape[1] for row in rows])
    padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, : row.shape[1]] = row
    cache = Cache(model, max_num_tokens=2048)
    params = {
        "cache": cache,
        "sequences": [cache.new_sequence(int(n) + 1) for n in lengths],
        "new_lengths": lengths,
    }
    logits = model.forward(padded, {**params, "last_tokens_only": 1})
    del params["new_lengths"]
    after = model.forward(torch.full((len(rows), 1), 42), {**params, "cache_seqlens": lengths})
    for index, row in enumerate(rows):
        alone = model.forward(torch.cat([row, torch.tensor([[42]])], dim=1), {})[0]
        for found, expected in ((logits[index, 0], alone[-2]), (after[index, 0], alone[-1])):
            assert (found - expected).norm() <= 1e-4 * expected.norm(), PROMPTS[index]


def test_the_rectangular_form_of_the_parameters_works_without_handles(parts):
    model, _ = parts
    ids = torch.randint(2, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    cache = Cache(model, max_num_tokens=512)
    params = {"attn_mode": "flash_attn", "cache": cache, "batch_shape": (2, 256)}
    head = model.forward(ids[:, :30], {**params, "past_len": 0})
    tail = model.forward(ids[:, 30:], {**params, "past_len": 30})
    expected = model.forward(ids, {})
    assert (torch.cat([head, tail], dim=1) - expected).norm() <= 1e-4 * expected.norm()


def test_sampled_completions_stream_whole_and_do_not_depend_on_the_batch(parts):
    options = {"max_new_tokens": 24, "seed": 11, "sampler": CategoricalSampler(1.2)}
    together = generator_of(parts).generate(PROMPTS, **options)
    streamed = list(PROMPTS)
    pieces = generator_of(parts).generate(PROMPTS, stream=True, completion_only=True, **options)
    for index, piece in pieces:
        streamed[index] += piece
    assert streamed == together
    assert together == [generator_of(parts).generate(text, **options) for text in PROMPTS]


def test_a_trained_model_continues_in_its_own_style():
    config = Config.from_directory(MODELS["trained-qwen35"])
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=256)
    model.load(device="cpu")
    generator = Generator(model=model, cache=cache, tokenizer=Tokenizer.from_config(config))
    text = generator.generate(
        prompt="The king said", max_new_tokens=8, add_bos=True, sampler=GreedySampler()
    )
    assert text == "The king said unto him, What is this th"
