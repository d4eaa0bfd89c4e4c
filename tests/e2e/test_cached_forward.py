"""A sequence in pieces through a cache gives the logits of the whole sequence."""

import pytest
import torch
from tiny_models import (
    llama_config,
    load_model,
    qwen35_config,
    random_exl3,
    random_tensors,
    write_folder,
)

from exllamav3.cache import Cache
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

CONFIGS = {
    "llama": llama_config(num_attention_heads=9, num_key_value_heads=3, head_dim=80),
    "qwen3.5": qwen35_config(),
}
REAL_HEADS = qwen35_config() | {
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""The heads of Qwen3.5-27B, 24/4 of 256 lanes with a gate, on a narrow residual stream."""
FUSED = {
    "llama, fused": (CONFIGS["llama"], (0, 1), (720, 240, 240)),
    "qwen3.5, fused": (REAL_HEADS, (1,), (12288, 1024, 1024)),
}


@pytest.fixture(params=[*CONFIGS, *FUSED])
def model(request, tmp_path, device):
    """Dense models, and quantized ones whose attention blocks are fused."""
    if request.param in CONFIGS:
        config = CONFIGS[request.param]
        yield load_model(write_folder(tmp_path, config, random_tensors(config)), device)
        return
    config, numbers, splits = FUSED[request.param]
    layers = [f"model.layers.{number}.self_attn" for number in numbers]
    projections = (Projection("qkv_proj", 4, "mul1", "always"),)
    topology = ResolvedTopology(tuple(TopologyRow(layer, splits, projections) for layer in layers))
    tensors = random_tensors(
        config,
        topology=topology,
        quantize=lambda part: random_exl3(part.key, part.in_features, part.out_features),
    )
    quantization = {
        "quant_method": "exl3",
        "version": "1",
        "bits": 4.0,
        "head_bits": 4,
        "exl3_qkv_topology": topology.to_obj(),
    }
    folder = write_folder(tmp_path, config | {"quantization_config": quantization}, tensors)
    model = load_model(folder, device)
    yield model
    taken = model.routes()
    assert list(taken) == layers
    assert all(set(routes) == {"fused"} for routes in taken.values())


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
