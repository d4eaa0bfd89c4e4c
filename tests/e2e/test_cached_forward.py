"""A sequence in pieces through a cache gives the logits of the whole sequence."""

import pytest
import torch
from tiny_models import llama_config, load_model, qwen35_config, random_tensors, write_folder

from exllamav3.cache import Cache

CONFIGS = {
    "llama": llama_config(num_attention_heads=9, num_key_value_heads=3, head_dim=80),
    "qwen3.5": qwen35_config(),
}


@pytest.fixture(params=CONFIGS)
def model(request, tmp_path, device):
    config = CONFIGS[request.param]
    return load_model(write_folder(tmp_path, config, random_tensors(config)), device)


def assert_same(found, expected):
    """Equal up to the order of sums: float32 on the CPU, float16 activations on a GPU."""
    tolerance = 1e-4 if found.device.type == "cpu" else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def ids(rows, columns, seed=0):
    return torch.randint(0, 130, (rows, columns), generator=torch.Generator().manual_seed(seed))


def test_prefill_in_pieces_and_decode_equal_the_uncached_pass(model):
    rows = ids(2, 300)  # longer than a cache page
    whole = model.forward(rows)
    cache = Cache(model, max_num_tokens=1024)
    params = {"cache": cache, "attn_mode": "flash_attn", "batch_shape": (2, 512)}
    past, parts = 0, []
    for part in rows.split([200, 97, 1, 1, 1], dim=1):
        parts.append(model.forward(part, params | {"past_len": past}))
        past += part.shape[1]
    assert_same(torch.cat(parts, 1), whole)


def test_rows_of_unequal_length_equal_each_row_alone(model):
    rows, lengths = ids(3, 9, seed=1), [9, 4, 1]
    following = ids(3, 1, seed=2)
    cache = Cache(model, max_num_tokens=1024)
    sequences = [cache.new_sequence(16) for _ in lengths]
    params = {"cache": cache, "sequences": sequences}
    start = params | {
        "cache_seqlens": torch.zeros(3, dtype=torch.int64),
        "new_lengths": torch.tensor(lengths),
        "last_tokens_only": 1,
    }
    first = model.forward(rows, start)
    second = model.forward(following, params | {"cache_seqlens": torch.tensor(lengths)})
    for row, length in enumerate(lengths):
        alone = torch.cat([rows[row, :length], following[row]])[None]
        expected = model.forward(alone)[0]
        assert_same(first[row, 0], expected[-2])
        assert_same(second[row, 0], expected[-1])
