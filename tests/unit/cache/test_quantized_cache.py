from itertools import pairwise

import pytest
import torch
from fake_model import FakeModel

from exllamav3.cache import Cache
from exllamav3.cache.quantized import QuantizedKvLayer
from exllamav3.errors import FormatError, UnsupportedError

CPU = torch.device("cpu")


def round_trip(x_NHD, bits, dtype=torch.float32):
    """What a layer gives back for tokens written to scattered places."""
    layer = QuantizedKvLayer(2, x_NHD.shape[1], x_NHD.shape[2], (bits, bits), dtype, CPU)
    places = torch.arange(len(x_NHD)) + 256
    layer.write(places, x_NHD, -x_NHD)
    k, v = layer.read(torch.tensor([[1]]), len(x_NHD), None)
    assert (k + v).norm() <= 0.5 * k.norm()  # v is stored apart; halves may round otherwise
    return k[0]


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_lane_is_off_by_at_most_half_a_step_in_the_rotated_basis(bits):
    x = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0))
    error = (round_trip(x, bits) - x).reshape(50, 4, 32).norm(dim=-1)
    # The rotation keeps norms: a group of 32 lanes is off by at most sqrt(32) half steps, and a
    # rotated lane of a group of norm n is at most n. 1.001: the step is rounded to float16.
    step = 2 * x.reshape(50, 4, 32).norm(dim=-1) / (2**bits - 1)
    assert (error <= 1.001 * 32**0.5 * step / 2).all()


def test_every_further_bit_halves_the_error():
    x = torch.randn(200, 1, 128, generator=torch.Generator().manual_seed(0))
    errors = [float((round_trip(x, b) - x).norm() / x.norm()) for b in range(2, 9)]
    assert all(0.35 < after / before < 0.6 for before, after in pairwise(errors))
    assert errors[2] < 0.1  # 4 bits
    assert errors[6] < 0.006  # 8 bits


def test_zeros_and_outliers_survive():
    x = torch.zeros(3, 1, 32)
    x[1, 0, 5] = 1000.0
    x[2] = 1e-3
    out = round_trip(x, 8)
    assert torch.equal(out[0], x[0])
    assert torch.allclose(out[1], x[1], atol=1000 / 128)
    # A constant rotates into one lane; the others, 0, lie half a step (2.2e-5) off every level.
    assert torch.allclose(out[2], x[2], atol=32**0.5 * 2.3e-5)


def test_the_activation_dtype_comes_back():
    assert round_trip(torch.randn(4, 1, 32).half(), 6, torch.float16).dtype == torch.float16


def test_memory_is_bits_and_a_half_a_lane():
    layer = QuantizedKvLayer(1, 2, 64, (4, 3), torch.float32, CPU)
    lanes = 256 * 2 * 64
    assert layer.size_bytes == lanes * 4.5 / 8 + lanes * 3.5 / 8


def test_cleared_pages_read_as_zeros():
    layer = QuantizedKvLayer(2, 1, 32, (4, 4), torch.float32, CPU)
    layer.write(torch.arange(512), torch.randn(512, 1, 32), torch.randn(512, 1, 32))
    layer.clear(torch.tensor([1]))
    k, v = layer.read(torch.tensor([[0, 1]]), 512, 0)
    assert k[0, :256].abs().min() > 0
    assert not k[0, 256:].any()
    assert not v[0, 256:].any()


class WideModel(FakeModel):
    """The fake model with its two heads of 4 lanes announced and stored as two of 16."""

    def cache_specs(self):
        specs = super().cache_specs()
        return [*specs[:-1], type(specs[-1])(layer=3, kv_heads=2, head_dim=16)]

    def forward(self, ids, params):
        cache = params.get("cache")
        return super().forward(
            ids, params if cache is None else {**params, "cache": Widened(cache)}
        )


class Widened:
    """Pads keys and values with zero lanes on their way into a cache and drops them after."""

    def __init__(self, cache):
        self.cache = cache

    def bind(self, params, batch):
        self.bound = self.cache.bind({**params, "cache": self.cache}, batch)
        return self

    def update_kv(self, layer, k, v, ctx):
        widened = [torch.nn.functional.pad(t, (0, 12)) for t in (k, v)]
        return tuple(t[..., :4] for t in self.bound.update_kv(layer, *widened, ctx))

    def __getattr__(self, name):
        return getattr(self.bound, name)


def test_a_model_through_an_8_bit_cache_stays_close_to_itself():
    model = WideModel()
    ids = torch.randint(2, 258, (1, 290), generator=torch.Generator().manual_seed(0))
    expected = model.forward(ids, {})
    errors = []
    for bits in (8, 4):
        cache = Cache(model, max_num_tokens=512, k_bits=bits, v_bits=bits)
        params = {"cache": cache, "batch_shape": (1, 512)}
        head = model.forward(ids[:, :280], params)
        tail = model.forward(ids[:, 280:], {**params, "past_len": 280})
        errors.append(float((torch.cat([head, tail], 1) - expected).norm() / expected.norm()))
    assert errors[0] < 0.01
    assert errors[0] < errors[1] < 0.15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k_bits": 4}, "both or neither"),
        ({"k_bits": 1, "v_bits": 4}, "k_bits is 1, expected 2 to 8"),
        ({"k_bits": 4, "v_bits": 9}, "v_bits is 9"),
        ({"k_bits": 4.5, "v_bits": 4}, "k_bits is 4.5"),
    ],
)
def test_bits_outside_the_domain_are_refused(options, message):
    with pytest.raises(FormatError, match=message):
        Cache(FakeModel(), max_num_tokens=256, **options)


def test_lanes_that_make_no_whole_group_are_refused():
    with pytest.raises(UnsupportedError, match="2 heads of 4 are 8 lanes"):
        QuantizedKvLayer(1, 2, 4, (4, 4), torch.float32, CPU)
