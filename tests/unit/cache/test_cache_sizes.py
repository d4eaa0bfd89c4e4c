"""Memory of a cache before it is taken equals what is taken."""

import pytest
import torch
from fake_model import FakeModel

from exllamav3 import Cache
from exllamav3.cache.kv import PlainKvLayer
from exllamav3.cache.quantized import QuantizedKvLayer
from exllamav3.cache.recurrent import RecurrentLayer
from exllamav3.cache.sizes import spec_bytes
from exllamav3.modules.context import KvSpec, RecurrentSpec

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bits", [None, (2, 8), (4, 5)])
def test_keys_and_values_take_what_was_said(dtype, bits):
    sizes = (3, 2, 48)
    layer = (
        PlainKvLayer(*sizes, dtype, CPU)
        if bits is None
        else QuantizedKvLayer(*sizes, bits, dtype, CPU)
    )
    assert spec_bytes(KvSpec(5, 2, 48), 3, 7, bits, dtype) == layer.size_bytes


def test_recurrent_states_take_what_was_said():
    spec = RecurrentSpec(0, conv_channels=10, conv_kernel=4, value_heads=3, key_dim=5, value_dim=6)
    layer = RecurrentLayer(7, spec, CPU)
    assert spec_bytes(spec, 3, 7, None, torch.float16) == layer.size_bytes


def test_what_a_cache_has_taken_is_pending_no_more():
    model = FakeModel()
    cache = Cache(model, 512, 4)
    pending = cache.pending_bytes(torch.float32)
    assert sorted(pending) == [0, 3]
    assert cache.size_bytes == 0
    model.forward(torch.ones(1, 3, dtype=torch.long), {"cache": cache, "batch_shape": (1, 256)})
    assert cache.size_bytes == sum(pending.values())
    assert cache.pending_bytes(torch.float32) == {}
