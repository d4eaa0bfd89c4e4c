"""Layers on two GPUs: the bits of one GPU, whatever the order of loading and caching."""

import gc
from pathlib import Path

import pytest
import torch
from fake_model import byte_tokenizer, run_jobs
from four_layers import KINDS, FourLayers, cached_devices

from exllamav3 import Generator, Job
from exllamav3.cli.main import main
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.generator import GreedySampler
from exllamav3.generator.decode_graphs import DecodeGraphs
from exllamav3.model.devices import free_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.two_gpus,
]

BOTH = ["cuda:0", "cuda:1"]
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "tiny-qwen35-lm")


@pytest.fixture(params=KINDS)
def tiny(request):
    return FourLayers(request.param)


def prompt(length, start=0):
    return torch.arange(start, start + length)[None] * 7 % 120 + 2


def is_split(model):
    return [str(device) for device in model.devices] == BOTH


@pytest.mark.parametrize("length", [1, 9, 300])
def test_uncached_logits_are_those_of_one_gpu_bit_for_bit(tiny, length):
    one, two = tiny.load(device="cuda:0"), tiny.load(devices=BOTH)
    assert is_split(two)
    assert {top.device.index for top in two.modules} == {0, 1}
    ids = torch.cat([prompt(length), prompt(length, 50)])
    expected, found = one.forward(ids), two.forward(ids)
    assert found.device == torch.device("cuda:1")
    assert expected.isfinite().all()
    assert torch.equal(found.cpu(), expected.cpu())
    params = {"new_lengths": torch.tensor([length, max(1, length // 3)]), "last_tokens_only": 2}
    assert torch.equal(two.forward(ids, params).cpu(), one.forward(ids, params).cpu())


@pytest.mark.parametrize("cache_first", [False, True])
def test_cached_logits_are_those_of_one_gpu_bit_for_bit(tiny, cache_first):
    def logits(**where):
        model = tiny.build()
        cache = tiny.cache(model) if cache_first else None
        model.load(source=tiny.source, **where)
        cache = cache or tiny.cache(model)
        rows = [cache.new_sequence(600) for _ in range(2)]
        outputs = []
        past = torch.zeros(2, dtype=torch.long)
        for length, real in ((200, (200, 77)), (1, (1, 1)), (1, (1, 1)), (30, (30, 30))):
            ids = torch.cat([prompt(length), prompt(length, 50)])
            params = {"cache": cache, "sequences": rows, "cache_seqlens": past}
            if real[0] != real[1]:
                params["new_lengths"] = torch.tensor(real)
            outputs.append(model.forward(ids, params)[:, : min(real)].cpu())
            past = past + torch.tensor(real)
        layers, kept = cached_devices(model, cache)
        assert kept == layers
        return outputs

    for found, expected in zip(logits(devices=BOTH), logits(device="cuda:0"), strict=True):
        assert torch.equal(found, expected)


def jobs():
    lengths = {"short": (3, 20), "crosses a page": (250, 12), "long": (700, 6), "one": (1, 2)}
    return [
        Job(
            prompt(n, n)[0].tolist(), new, sampler=GreedySampler(), ignore_eos=True, identifier=name
        )
        for name, (n, new) in lengths.items()
    ]


@pytest.mark.parametrize("devices", [BOTH, BOTH[::-1]], ids=["forth", "back"])
def test_generated_tokens_are_those_of_one_gpu(tiny, devices):
    def tokens(model, **options):
        generator = Generator(model, tiny.cache(model), byte_tokenizer(), **options)
        return run_jobs(generator, jobs())[0], generator

    one, two = tiny.load(device="cuda:0"), tiny.load(devices=devices)
    found, generator = tokens(two)
    assert len(generator._graphs.shapes) >= 3
    assert found == tokens(two, cuda_graphs=False)[0]
    assert found == tokens(one)[0]
    assert found == tokens(one, cuda_graphs=False)[0]


def steps(tiny, capture, busy=(), count=12, **where):
    """Logits of steps of three sequences; GPUs in `busy` are given other work before each."""
    model = tiny.load(**where)
    cache = tiny.cache(model)
    sequences = [cache.new_sequence(600) for _ in range(3)]
    for row, sequence in enumerate(sequences):
        ids = prompt(8 + 123 * row)  # the last one crosses into its second page at step 2
        model.forward(ids, {"cache": cache, "sequences": [sequence]})
        sequence.length = ids.shape[1]
    graphs = DecodeGraphs(model, cache, model.device, capture)
    logits = []
    for step in range(count):
        for index in busy:
            with torch.cuda.device(index):
                torch.cuda._sleep(10_000_000)  # some milliseconds
        ids = torch.tensor([[5 + step], [50 + step], [100 - step]])
        logits.append(graphs.step(sequences, ids).clone())
        for sequence in sequences:
            sequence.length += 1
    return torch.stack(logits).cpu(), graphs, sequences


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("busy", [(), (0,), (1,)], ids=["idle", "first busy", "second busy"])
def test_steps_have_the_bits_of_one_gpu_whichever_gpu_is_late(tiny, busy, capture):
    found, graphs, _ = steps(tiny, capture, busy, devices=BOTH)
    expected, _, _ = steps(tiny, False, device="cuda:0")
    assert len(graphs.shapes) == 2
    assert expected.isfinite().all()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "graphs"])
def test_the_host_does_not_wait_where_the_gpus_meet(tiny, capture):
    _, graphs, sequences = steps(tiny, capture, count=4, devices=BOTH)
    ids = torch.tensor([[1], [2], [3]])

    def allocations():
        names = [torch.cuda.memory_stats(d)["allocation.all.allocated"] for d in BOTH]
        return names if capture else None

    for device in BOTH:
        torch.cuda.synchronize(device)
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graphs.step(sequences, ids)
            for sequence in sequences:
                sequence.length += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before


def test_graphs_of_either_gpu_can_be_captured_in_one_process():
    tiny = FourLayers("llama")
    expected, _, _ = steps(tiny, True, device="cuda:0")
    for where in ({"device": "cuda:1"}, {"devices": ["cuda:1"]}, {"device": "cuda:0"}):
        assert torch.equal(steps(tiny, True, **where)[0], expected)


def test_planned_sizes_are_what_the_gpus_give():
    tiny = FourLayers("llama")
    gc.collect()
    before = [torch.cuda.memory_allocated(device) for device in BOTH]
    model = tiny.load(devices=BOTH)
    for index, start in enumerate(before):
        tops = [top for top in model.modules if top.device.index == index]
        planned = sum(top.total_bytes(tiny.source, torch.float16) for top in tops)
        taken = torch.cuda.memory_allocated(index) - start
        assert 0 <= taken - planned < 512 * 100  # torch hands out multiples of 512 bytes


def test_limits_decide_where_the_cut_is():
    tiny = FourLayers("qwen3.5")
    source, sizes = tiny.source, []
    for top in tiny.build().modules:
        sizes.append(top.total_bytes(source, torch.float16) / 2**30)
    expected = tiny.load(device="cuda:0").forward(prompt(9)).cpu()
    for count in range(1, 7):
        model = tiny.load(devices=BOTH, use_per_device=[sum(sizes[:count]) + 1e-9, 1.0])
        assert [top.device.index for top in model.modules] == [0] * count + [1] * (7 - count)
        assert torch.equal(model.forward(prompt(9)).cpu(), expected)


def test_full_gpus_get_nothing_or_are_refused():
    tiny = FourLayers("llama")
    taken = [torch.empty(0), torch.empty(0)]
    gc.collect()
    torch.cuda.empty_cache()
    try:
        for index, message in ((1, None), (0, "does not fit.*cuda:0 needs .*cuda:1 needs")):
            device = torch.device("cuda", index)
            size = free_bytes(device) - 2**29
            taken[index] = torch.empty(size, dtype=torch.uint8, device=device)
            if message is None:
                model = tiny.load(devices=BOTH)
                assert [str(d) for d in model.devices] == ["cuda:0"]
            else:
                with pytest.raises(UnsupportedError, match=message):
                    tiny.load(devices=BOTH)
    finally:
        taken.clear()
        torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"devices": ["cuda:0", "cuda"]}, "cuda:0 is named twice"),
        ({"devices": ["cuda:0", "cuda:99"]}, "'cuda:99' does not exist here"),
        ({"devices": ["cuda:0", "cpu"]}, "layers are split over GPUs only"),
        ({"devices": BOTH, "use_per_device": [1e-5, 1e-5]}, "use_per_device: too little"),
        ({"devices": BOTH, "use_per_device": [1e-3]}, "expected one for each of the 2 devices"),
    ],
)
def test_devices_that_cannot_be_are_refused(where, message):
    with pytest.raises((FormatError, UnsupportedError), match=message):
        FourLayers("llama").load(**where)


def test_a_cache_does_not_follow_a_model_that_moves():
    tiny = FourLayers("qwen3.5")
    model = tiny.load(devices=BOTH)
    cache = tiny.cache(model)
    params = {"cache": cache, "sequences": [cache.new_sequence(64)]}
    model.forward(prompt(9), params)
    model.unload()
    model.load(source=tiny.source, devices=BOTH)
    model.forward(prompt(9), params)
    model.load(source=tiny.source, device="cuda:1")
    with pytest.raises(FormatError, match="make a new cache"):
        model.forward(prompt(9), params)


def test_the_commands_take_several_devices(capsys):
    outputs = []
    for where in (
        ["--device", "cuda:0"],
        ["-d", "0"],
        ["-d", "0,1"],
        ["--devices=0,1", "--use-per-device=0.004,1"],
    ):
        generate = ["generate", EXAMPLE, "The king said", "-n", "24", "--greedy", *where]
        assert main(generate) == 0
        evaluate = ["eval", EXAMPLE, "--rows=2", "--cols=64", "--json", *where]
        assert main(evaluate) == 0
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 1, outputs
