import pytest
import torch
from fake_model import FakeModel, byte_tokenizer, greedy_uncached, run_jobs

from exllamav3.cache import Cache
from exllamav3.errors import FormatError
from exllamav3.generator import CategoricalSampler, ComboSampler, Generator, GreedySampler, Job

PROMPTS = ["Hello", "a", "The quick brown fox jumps over the lazy dog", "xyz " * 80]


def make(tokens=4096, seed=0, **options):
    model = FakeModel(seed=seed)
    cache = Cache(model, max_num_tokens=tokens, max_batch_size=options.pop("batch", 16))
    return Generator(model, cache, byte_tokenizer(), **options)


def greedy_jobs(generator, count=12, prompts=PROMPTS):
    return [
        Job(
            generator.tokenizer.encode(text),
            count,
            sampler=GreedySampler(),
            ignore_eos=True,
            identifier=i,
        )
        for i, text in enumerate(prompts)
    ]


@pytest.mark.parametrize("chunk", [1, 13, 2048])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_batched_greedy_tokens_equal_those_of_uncached_passes(chunk, batch):
    generator = make(batch=batch, max_chunk_size=chunk)
    tokens, _ = run_jobs(generator, greedy_jobs(generator))
    for index, text in enumerate(PROMPTS):
        ids = generator.tokenizer.encode_ids(text)
        assert tokens[index] == greedy_uncached(generator.model, ids, 12)
    assert generator.cache.free_tokens == 4096


def test_jobs_wait_for_room_and_start_in_order():
    generator = make(tokens=768)
    jobs = greedy_jobs(generator, count=3, prompts=["a" * 300, "b" * 300, "c"])
    _, results = run_jobs(generator, jobs)
    started = [r["serial"] for r in results if r["stage"] == "started"]
    ended = [r["serial"] for r in results if r["eos"]]
    assert started == [0, 1, 2]  # "c" would have fitted beside the first, but does not overtake
    assert ended[0] == 0


def test_decoding_goes_on_in_one_batch_while_a_long_prompt_is_processed():
    generator = make(max_chunk_size=16)
    run_jobs(generator, greedy_jobs(generator, prompts=["a", "b" * 100]))
    assert (2, 1) in generator.model.calls
    assert generator.model.calls[:4] == [(1, 1), (1, 1), (1, 16), (1, 1)]


def test_results_describe_the_whole_run():
    generator = make(max_chunk_size=4)
    _, results = run_jobs(generator, greedy_jobs(generator, count=3, prompts=["abcdef"]))
    assert [r["stage"] for r in results] == ["started", "prefill", "prefill"] + ["streaming"] * 3
    assert [r["curr_progress"] for r in results[1:3]] == [4, 6]
    assert all(r["max_progress"] == 6 for r in results[1:3])
    assert [r["eos"] for r in results] == [False] * 5 + [True]
    last = results[-1]
    assert (last["prompt_tokens"], last["new_tokens"]) == (6, 3)
    assert last["eos_reason"] == "max_new_tokens"
    assert last["full_completion"] == "".join(r["text"] for r in results[3:])
    assert min(last["time_enqueued"], last["time_prefill"], last["time_generate"]) >= 0
    assert last["identifier"] == 0


def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch():
    def sampled(prompts, seed):
        generator = make()
        return generator.generate(
            prompts, 20, seed=seed, sampler=CategoricalSampler(1.5), completion_only=True
        )

    together = sampled(PROMPTS, 3)
    assert together == [sampled(text, 3) for text in PROMPTS]
    assert together == sampled(PROMPTS, 3)
    assert together != sampled(PROMPTS, 4)


def test_a_job_without_a_seed_tells_the_one_it_picked():
    generator = make()
    job = Job([40, 41], 8, sampler=CategoricalSampler(), identifier="x", ignore_eos=True)
    tokens, _ = run_jobs(generator, [job])
    again = Job(
        [40, 41], 8, sampler=CategoricalSampler(), identifier="x", seed=job.seed, ignore_eos=True
    )
    assert run_jobs(generator, [again])[0] == tokens


@pytest.mark.parametrize("completion_only", [False, True])
def test_streamed_pieces_join_to_the_returned_text(completion_only):
    options = {"seed": 1, "completion_only": completion_only}
    whole = make().generate(PROMPTS, 30, **options)
    pieces = [""] * len(PROMPTS)
    for index, piece in make().generate(PROMPTS, 30, stream=True, **options):
        pieces[index] += piece
    assert pieces == whole
    assert "".join(make().generate(PROMPTS[0], 30, stream=True, **options)) == whole[0]
    assert whole[0].startswith("Hello") or completion_only


def test_an_abandoned_stream_leaves_the_cache_free():
    generator = make()
    stream = generator.generate(PROMPTS, 30, stream=True, ignore_eos=True)
    next(stream)
    stream.close()
    assert generator.num_remaining_jobs() == 0
    assert generator.cache.free_tokens == 4096


def completion(generator, **options):
    tokens, results = run_jobs(
        generator, [Job([40, 41], 40, sampler=GreedySampler(), identifier=0, **options)]
    )
    return tokens[0], results[-1]


def test_a_stop_token_ends_the_completion_and_has_no_text():
    free, _ = completion(make(), ignore_eos=True)
    stop = free[6]
    first = free.index(stop)
    tokens, last = completion(make(), ignore_eos=True, stop_conditions=[stop])
    assert tokens == free[: first + 1]
    assert last["eos_reason"] == "stop_token"
    assert last["eos_triggering_token_id"] == stop
    assert last["full_completion"] == byte_tokenizer().decode(free[:first])


def test_the_end_of_text_token_stops_unless_ignored_and_not_before_the_minimum():
    generator = make()
    generator.model.head[:, 0] = 0
    free, _ = completion(generator, ignore_eos=True)
    # With a constant logit for the end that beats everything the first choice is the end.
    always_end = make()
    forward = always_end.model.forward

    def ends(ids, params):
        logits = forward(ids, params)
        logits[..., 0] = 1e4
        return logits

    always_end.model.forward = ends
    tokens, last = completion(always_end)
    assert (tokens, last["eos_reason"]) == ([0], "stop_token")
    tokens, _ = completion(always_end, min_new_tokens=5)
    assert len(tokens) == 6
    assert tokens[-1] == 0
    tokens, last = completion(always_end, ignore_eos=True)
    assert tokens == [0] * 40
    assert len(free) == 40


def test_a_stop_string_ends_the_completion_before_it():
    generator = make()
    text = generator.generate("Hello", 40, completion_only=True, sampler=GreedySampler())
    stop = text[5:8]
    place = text.index(stop)
    job = Job(
        generator.tokenizer.encode("Hello"), 40, sampler=GreedySampler(), stop_conditions=[stop]
    )
    _, results = run_jobs(generator, [job])
    assert results[-1]["eos_reason"] == "stop_string"
    assert results[-1]["eos_triggering_string"] == stop
    assert results[-1]["full_completion"] == text[:place]


def test_penalties_see_the_prompt_and_the_completion():
    generator = make()
    tokens, _ = run_jobs(
        generator,
        [
            Job(
                [40, 41, 42],
                60,
                sampler=ComboSampler(0, pres_p=1e4),
                identifier=0,
                ignore_eos=True,
            )
        ],
    )
    assert len(set(tokens[0])) == 60
    assert not set(tokens[0]) & {40, 41, 42}


def test_without_a_limit_a_completion_fills_the_sequence():
    generator = make(tokens=256, max_seq_len=100)
    job = Job([40, 41], sampler=GreedySampler(), identifier=0, ignore_eos=True)
    tokens, results = run_jobs(generator, [job])
    assert len(tokens[0]) == 98
    assert results[-1]["eos_reason"] == "max_new_tokens"


@pytest.mark.parametrize(
    ("prompt", "new", "limit"), [(300, 1, None), (200, 100, None), (60, 50, 100)]
)
def test_sequences_that_can_never_fit_are_refused_when_enqueued(prompt, new, limit):
    generator = make(tokens=256, max_seq_len=limit)
    with pytest.raises(FormatError, match=f"limited to {limit or 256} tokens"):
        generator.enqueue(Job([40] * prompt, new))
    with pytest.raises(FormatError, match="limited to"):
        generator.generate("x" * prompt, new, stream=True)
    assert generator.num_remaining_jobs() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.long)}, "one job for each prompt"),
        ({"input_ids": torch.zeros(3)}, "expected int64"),
        ({"input_ids": [1], "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"input_ids": [1], "max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ({"input_ids": [1], "min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"input_ids": [1], "max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens is 3"),
        ({"input_ids": [1], "stop_conditions": [None]}, r"stop_conditions\[0\]"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(FormatError, match=message):
        Job(**arguments)


def test_a_job_runs_once():
    generator = make()
    job = Job([40], 2)
    run_jobs(generator, [job])
    with pytest.raises(FormatError, match="was enqueued before"):
        generator.enqueue(job)


def test_generate_refuses_to_swallow_the_results_of_other_jobs():
    generator = make()
    job = Job([40], 2)
    generator.enqueue(job)
    with pytest.raises(FormatError, match="1 jobs are still running"):
        generator.generate("a", 2)
    generator.cancel(job)
    generator.generate("a", 2)


def test_a_job_whose_logits_are_not_finite_fails_without_the_others():
    generator = make()
    generator.model.embedding[43] = float("nan")
    jobs = [Job([43], 5, identifier=0), Job([44], 5, identifier=1, ignore_eos=True)]
    generator.enqueue(jobs)
    with pytest.raises(FormatError, match="NaN"):
        generator.iterate()
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert [r["identifier"] for r in results if r["eos"]] == [1]


@pytest.mark.parametrize("seed", [2**70 + 5, -(2**70) + 5, 5 - 2**32])
def test_a_seed_counts_with_its_low_32_bits_whatever_its_size(seed):
    def sampled(seed):
        return make().generate("ab", 6, seed=seed, sampler=CategoricalSampler(1.5))

    assert sampled(seed) == sampled(5)


@pytest.mark.parametrize("seed", [1.5, "7", True])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(FormatError, match=r"seed is .*expected a whole number"):
        Job([1], seed=seed)
