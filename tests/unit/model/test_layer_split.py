"""A model on several devices: what is refused, what goes where, and that passes stay at home."""

import pytest
import torch
from fake_gpus import fake_gpus
from four_layers import KINDS, FourLayers, cached_devices
from tiny_models import llama_config, load_model, random_tensors, write_folder

from exllamav3 import Cache
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.generator.decode_graphs import DecodeGraphs
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.gated_delta_net import GatedDeltaNet
from exllamav3.modules.linear import Linear
from exllamav3.modules.norm import RMSNorm

GIB = 2**30
BOTH = ["cuda:0", "cuda:1"]
MARKERS = (".mul1", ".mcg")
"""Tensors that are written to a file, but not held."""


def four_layers(kind):
    """A model without weights, and where they are."""
    made = FourLayers(kind)
    return made.build(), made.source


class Unreadable:
    """A source that gives no tensor."""

    def __init__(self, source):
        self.names, self.has, self.describe = source.names, source.has, source.describe

    def get(self, name):
        pytest.fail(f"{name} was read")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["cuda:0", "cuda:0"]}, "cuda:0 is named twice"),
        ({"devices": ["cuda:0", torch.device("cuda")]}, "cuda:0 is named twice"),
        ({"devices": ["cuda:0", "cuda:2"]}, "'cuda:2' does not exist here; GPUs here: cuda:0, cu"),
        ({"devices": ["cuda:0", "cpu"]}, "'cpu' is no GPU, and layers are split over GPUs only"),
        ({"devices": ["meta"]}, "'meta' is no GPU"),
        ({"devices": ["cuda:0", "tpu"]}, "'tpu' is not one that torch knows"),
        ({"devices": []}, "devices is empty"),
        ({"devices": "cuda:0"}, "expected a list of devices"),
        ({"devices": BOTH, "device": "cuda:0"}, "give one of them"),
        ({"use_per_device": [1.0]}, "without the devices it is for"),
        ({"devices": BOTH, "use_per_device": [1.0]}, "has 1 sizes, expected one for each of the 2"),
        ({"devices": BOTH, "use_per_device": 8}, "8, expected a list of sizes in GiB"),
        ({"devices": BOTH, "use_per_device": [1.0, -1]}, "-1 is no size"),
        ({"devices": BOTH, "use_per_device": [float("nan"), 1]}, "nan is no size"),
        ({"devices": BOTH, "use_per_device": [1e-5, 1e-5]}, "use_per_device: too little for wei"),
        ({"devices": BOTH, "tensor_p": True}, "tensor parallelism is not there yet"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_is_read(
    monkeypatch, options, message
):
    model, source = four_layers("llama")
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        with pytest.raises((FormatError, UnsupportedError), match=message):
            model.load(source=Unreadable(source), **options)
        assert model.device is None
        assert model.devices == ()


def test_a_machine_without_gpus_says_so():
    model, source = four_layers("llama")
    if torch.cuda.device_count() == 0:
        with pytest.raises(UnsupportedError, match="'cuda:0' does not exist here; GPUs here: none"):
            model.load(source=Unreadable(source), devices=BOTH)


def test_a_model_too_large_for_its_devices_is_refused_before_anything_is_read(monkeypatch):
    model, source = four_layers("llama")
    with (
        fake_gpus(monkeypatch, GIB + 1000, GIB + 1000),
        pytest.raises(UnsupportedError, match=r"does not fit.*cuda:0 needs .*cuda:1 needs "),
    ):
        model.load(source=Unreadable(source), devices=BOTH)


def test_a_cache_made_before_counts_and_one_that_is_gone_does_not(monkeypatch):
    model, source = four_layers("llama")
    memory = GIB + 2**20  # enough for the weights, 0.6 MB
    cache = Cache(model, 2**14)
    assert sum(cache.pending_bytes(torch.float16).values()) == 4 * 2 * 2**14 * 64 * 2
    with fake_gpus(monkeypatch, memory, memory):
        with pytest.raises(UnsupportedError, match=r"caches of 0\.02 GiB"):
            model.load(source=Unreadable(source), devices=BOTH)
        del cache
        model.load(source=source, devices=BOTH)


@pytest.mark.parametrize("kind", ["llama", "half fused", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_planned_sizes_are_what_the_modules_hold(kind, dtype):
    model, source = four_layers(kind)
    model.load(device="cpu", source=source, dtype=dtype)
    for top in model.modules:
        held = 0
        for module in top:
            stored = [t for n, t in module.get_tensors().items() if not n.endswith(MARKERS)]
            if isinstance(module, RMSNorm):  # in float32, with the scale made of it
                stored = [t.float() for t in stored] * 2
            elif isinstance(module, GatedDeltaNet):
                gates = [linear.weight for linear in module.inputs[2:]]  # copied on a GPU
                stored = [*(t.float() for t in stored), *gates]
            elif isinstance(module, Linear) and isinstance(module.weight, torch.Tensor):
                stored = [module.weight]
            held += sum(t.numel() * t.itemsize for t in stored)
        assert top.total_bytes(source, dtype) == held, top.key


def test_layers_are_split_in_order_and_the_head_is_on_the_last_device(monkeypatch):
    model, source = four_layers("llama")
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        model.load(source=source, devices=BOTH)
        assert [module.device.index for module in model.modules] == [0, 0, 0, 1, 1, 1, 1]
        assert [str(device) for device in model.devices] == BOTH
        assert str(model.device) == "cuda:0"
        assert model.dtype == torch.float16
        for top in model.modules:
            assert {module.device for module in top} == {top.device}
            for tensors_of in (module.get_tensors() for module in top):
                kept = {t.device for n, t in tensors_of.items() if not n.endswith(MARKERS)}
                assert kept <= {top.device}
        model.unload()
        assert model.devices == ()
        model.load(source=source, devices=["cuda:1", "cuda:0"])
        assert [module.device.index for module in model.modules] == [1, 1, 1, 0, 0, 0, 0]


def test_use_per_device_fills_one_device_after_the_other(monkeypatch):
    model, source = four_layers("llama")
    sizes = [top.total_bytes(source, torch.float16) / GIB for top in model.modules]
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        for count in (1, 2, 5, 7):
            use = [sum(sizes[:count]) + 1e-9, 1.0]
            model.load(source=source, devices=BOTH, use_per_device=use)
            assert [m.device.index for m in model.modules] == [0] * count + [1] * (7 - count)


def passes(model, cache):
    """Logits of an uncached pass, of two cached rows, and of the same with constant shapes."""
    ids = torch.arange(6, device="cuda:0").view(2, 3)
    yield model.forward(ids, {})
    ones = torch.ones(2, dtype=torch.long, device="cuda:0")
    yield model.forward(ids, {"new_lengths": ones, "last_tokens_only": 2})
    rows = [cache.new_sequence(256) for _ in range(2)]
    yield model.forward(ids, {"cache": cache, "sequences": rows, "last_tokens_only": 1})
    fixed = {
        "sequences": cache.fixed_batch(rows, "cuda:0"),
        "cache_seqlens": ones,
    }
    yield model.forward(ids[:, :1], {"cache": cache, **fixed})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_first", [False, True])
def test_whole_passes_touch_only_tensors_of_the_device_of_each_layer(
    monkeypatch, kind, cache_first
):
    made = FourLayers(kind)
    model = made.build()
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        cache = made.cache(model) if cache_first else None
        model.load(source=made.source, devices=BOTH)
        cache = cache or made.cache(model)
        for logits in passes(model, cache):
            assert logits.device == torch.device("cuda:1")
            assert logits.dtype == torch.float32
        layers, kept = cached_devices(model, cache)
        assert len(set(layers.values())) == 2
        assert kept == layers
        assert cache.pending_bytes(torch.float16) == {}


def test_a_cache_of_a_model_that_has_moved_is_refused(monkeypatch):
    model, source = four_layers("qwen3.5")
    cache = Cache(model, 256)
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        rows = [cache.new_sequence(256)]
        ids = torch.zeros(1, 1, dtype=torch.long, device="cuda:0")
        for devices in (BOTH, BOTH[::-1]):
            model.load(source=source, devices=devices)
            if devices == BOTH:
                model.forward(ids, {"cache": cache, "sequences": rows})
        with pytest.raises(FormatError, match=r"layer 0 is on cuda:0, .* cuda:1; make a new cache"):
            model.forward(ids, {"cache": cache, "sequences": rows})


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_a_decode_step_is_cut_where_the_devices_meet(monkeypatch, kind):
    model, source = four_layers(kind)
    with fake_gpus(monkeypatch, 4 * GIB, 4 * GIB):
        model.load(source=source, devices=BOTH)
        cache = Cache(model, 512)
        rows = [cache.new_sequence(256) for _ in range(2)]
        graphs = DecodeGraphs(model, cache, model.device, capture=False)
        monkeypatch.setattr(ForwardContext, "to", None)  # each part has what it needs
        for _ in range(2):
            logits = graphs.step(rows, torch.tensor([[5], [6]]))
            assert (logits.device, logits.shape) == (torch.device("cuda:1"), (2, 130))
        with pytest.raises(FormatError, match=r"segment 2 does not exist, .* on 2 devices"):
            model.forward_segment(2, logits, {})


def test_one_device_is_loaded_as_before(tmp_path):
    config = llama_config()
    model = load_model(write_folder(tmp_path, config, random_tensors(config)))
    assert model.devices == (torch.device("cpu"),)
    assert model.device == torch.device("cpu")
