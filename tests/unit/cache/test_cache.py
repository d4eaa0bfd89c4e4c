import pytest
import torch
from fake_model import FakeModel

from exllamav3.cache import Cache
from exllamav3.cache.pages import PagePool
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext


def random_ids(count, seed=0, batch=1):
    return torch.randint(2, 258, (batch, count), generator=torch.Generator().manual_seed(seed))


def feed(model, cache, sequence, ids, chunk):
    """Run ids through the cache in chunks; return all logits."""
    parts = []
    for piece in ids.split(chunk, dim=1):
        params = {
            "cache": cache,
            "sequences": [sequence],
            "cache_seqlens": torch.tensor([sequence.length]),
        }
        parts.append(model.forward(piece, params))
        sequence.length += piece.shape[1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("chunk", [1, 7, 256, 300])
def test_chunks_through_the_cache_equal_one_uncached_pass(chunk):
    model, ids = FakeModel(), random_ids(300)
    cache = Cache(model, max_num_tokens=1024)
    logits = feed(model, cache, cache.new_sequence(300), ids, chunk)
    assert torch.allclose(logits, model.forward(ids, {}), atol=1e-4)


def test_scattered_pages_are_read_in_order():
    model, ids = FakeModel(), random_ids(500)
    cache = Cache(model, max_num_tokens=1024)
    first, second = cache.new_sequence(256), cache.new_sequence(256)
    third = cache.new_sequence(256)
    cache.release(first)
    cache.release(third)
    scattered = cache.new_sequence(768)  # pages 0, 2 and 3
    assert scattered.row.pages == (0, 2, 3)
    logits = feed(model, cache, scattered, ids, 100)
    assert torch.allclose(logits, model.forward(ids, {}), atol=1e-4)
    assert second.row.pages == (1,)


def test_padded_rows_of_unequal_length_equal_each_row_alone():
    model = FakeModel()
    cache = Cache(model, max_num_tokens=2048)
    lengths = [5, 290, 1]
    rows = [random_ids(n, seed) for seed, n in enumerate(lengths)]
    sequences = [cache.new_sequence(n + 8) for n in lengths]
    padded = torch.zeros(3, max(lengths), dtype=torch.long)
    for r, row in enumerate(rows):
        padded[r, : row.shape[1]] = row
    params = {"cache": cache, "sequences": sequences, "new_lengths": torch.tensor(lengths)}
    logits = model.forward(padded, params)
    follow = random_ids(3, seed=9, batch=3)
    params = {"cache": cache, "sequences": sequences, "cache_seqlens": torch.tensor(lengths)}
    after = model.forward(follow, params)
    for r, row in enumerate(rows):
        alone = model.forward(torch.cat([row, follow[r : r + 1]], dim=1), {})[0]
        assert torch.allclose(logits[r, : lengths[r]], alone[: lengths[r]], atol=1e-4)
        assert torch.allclose(after[r], alone[lengths[r] :], atol=1e-4)


def test_a_fixed_batch_reads_a_constant_length_and_gives_the_same_logits():
    model = FakeModel()
    cache = Cache(model, max_num_tokens=2048)
    lengths = torch.tensor([5, 290])
    rows = [random_ids(int(n) + 6, seed) for seed, n in enumerate(lengths)]
    sequences = [cache.new_sequence(row.shape[1]) for row in rows]
    for sequence, row, length in zip(sequences, rows, lengths, strict=True):
        feed(model, cache, sequence, row[:, :length], 256)
    batch = cache.fixed_batch(sequences, "cpu")
    assert batch.read_tokens == 512
    params = {"cache": cache, "sequences": batch, "cache_seqlens": lengths.clone()}
    for step in range(6):
        ids = torch.stack([row[0, n + step] for row, n in zip(rows, lengths, strict=True)])
        logits = model.forward(ids[:, None], params)
        for r, row in enumerate(rows):
            alone = model.forward(row, {})[0, int(lengths[r]) + step]
            assert torch.allclose(logits[r, 0], alone, atol=1e-4)
        params["cache_seqlens"] += 1
    with pytest.raises(FormatError, match="read_tokens is 600, expected 1 to 512"):
        cache.fixed_batch(sequences, "cpu", read_tokens=600)
    with pytest.raises(FormatError, match="takes no new_lengths"):
        model.forward(ids[:, None], {**params, "new_lengths": torch.tensor([1, 1])})


def test_a_rectangular_batch_needs_no_handles_and_starts_anew_at_position_zero():
    model, ids = FakeModel(), random_ids(40, batch=2)
    cache = Cache(model, max_num_tokens=1024)
    expected = model.forward(ids, {})
    for _ in range(2):
        params = {"cache": cache, "batch_shape": (2, 512), "past_len": 0}
        head = model.forward(ids[:, :30], params)
        tail = model.forward(ids[:, 30:], {**params, "past_len": 30})
        assert torch.allclose(torch.cat([head, tail], dim=1), expected, atol=1e-4)


def test_a_rectangular_batch_gives_its_room_up_for_one_of_another_shape():
    cache = Cache(FakeModel(), max_num_tokens=1024, max_batch_size=4)
    cache.bind({"batch_shape": (2, 512)}, 2)
    assert cache.free_tokens == 0
    cache.bind({"batch_shape": (4, 256)}, 4)
    cache.bind({"batch_shape": (1, 256)}, 1)
    assert cache.free_tokens == 768


def test_a_block_table_serves_models_without_recurrent_layers():
    model, ids = FakeModel(recurrent=False), random_ids(300)
    cache = Cache(model, max_num_tokens=1024)
    params = {"cache": cache, "block_table": torch.tensor([[3, 1]], dtype=torch.int32)}
    head = model.forward(ids[:, :200], {**params, "cache_seqlens": torch.tensor([0])})
    tail = model.forward(ids[:, 200:], {**params, "cache_seqlens": torch.tensor([200])})
    assert torch.allclose(torch.cat([head, tail], dim=1), model.forward(ids, {}), atol=1e-4)
    hybrid = FakeModel()
    with pytest.raises(FormatError, match="recurrent state, which a block table cannot"):
        hybrid.forward(ids, {**params, "cache": Cache(hybrid, 1024)})


def test_nothing_of_an_earlier_sequence_reaches_a_later_one():
    model, ids = FakeModel(), random_ids(20)
    cache = Cache(model, max_num_tokens=256, max_batch_size=1)
    model.embedding[5] = float("nan")
    poisoned = cache.new_sequence(256)
    feed(model, cache, poisoned, torch.full((1, 256), 5), 64)
    cache.release(poisoned)
    ids[ids == 5] = 6
    logits = feed(model, cache, cache.new_sequence(20), ids, 3)
    assert torch.allclose(logits, model.forward(ids, {}), atol=1e-4)


def test_the_cache_takes_the_dtype_of_the_activations():
    cache = Cache(FakeModel(), max_num_tokens=256)
    bound = cache.bind({"sequences": [cache.new_sequence(10)]}, 1)
    k = torch.randn(1, 3, 2, 4).half()
    k_all, v_all = bound.update_kv(3, k, k.transpose(0, 0), ForwardContext.uncached(1, 3))
    assert k_all.dtype == v_all.dtype == torch.float16
    assert torch.equal(k_all, k)
    assert cache.size_bytes == 2 * 256 * 2 * 4 * 2


def test_pages_are_consecutive_where_possible():
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(1)
    assert (first, second) == ([0, 1], [2])
    pool.give_back(first)
    assert pool.take(3) == [3, 4, 5]
    assert pool.take(1) == [0]
    with pytest.raises(FormatError, match="2 pages of 256 tokens asked for, 1 of 6 are free"):
        pool.take(2)


@pytest.mark.parametrize("tokens", [0, -256, 100, 1000])
def test_sizes_that_are_not_whole_pages_are_refused_with_the_next_one(tokens):
    with pytest.raises(FormatError, match="multiple of 256; use"):
        Cache(FakeModel(), max_num_tokens=tokens)


def test_a_token_beyond_the_reservation_is_refused():
    model = FakeModel()
    cache = Cache(model, max_num_tokens=1024)
    sequence = cache.new_sequence(256)
    with pytest.raises(FormatError, match="position 299, its sequence holds 256 tokens"):
        feed(model, cache, sequence, random_ids(300), 300)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "nothing"),
        ({"batch_shape": (1, 256), "block_table": torch.zeros(1, 1)}, "exactly one of"),
        ({"batch_shape": (2, 256)}, "describes 2 rows, the token ids have 1"),
        ({"batch_shape": (1, 4096)}, "needs 1 sequences and 4096 tokens"),
        ({"block_table": torch.tensor([[0, 4]])}, "page numbers from 0 to 3"),
    ],
)
def test_rows_that_are_not_described_are_refused(params, message):
    with pytest.raises(FormatError, match=message):
        Cache(FakeModel(), max_num_tokens=1024).bind(params, 1)


def test_more_sequences_than_there_are_slots_are_refused():
    cache = Cache(FakeModel(), max_num_tokens=1024, max_batch_size=1)
    cache.new_sequence(1)
    assert not cache.fits(1)
    with pytest.raises(FormatError, match="all 1 sequences are in use"):
        cache.new_sequence(1)


def test_layers_the_cache_was_not_made_for_are_refused():
    cache = Cache(FakeModel(recurrent=False), max_num_tokens=256)
    params = {"cache": cache, "sequences": [cache.new_sequence(5)]}
    with pytest.raises(FormatError, match="layer 0 has recurrent state"):
        FakeModel().forward(random_ids(3), params)
