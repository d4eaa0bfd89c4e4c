"""Conversion on a GPU: as accurate as on the CPU, on two GPUs as on one, in bounded memory."""

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conversion_support import folder_bytes, job_options, write_source
from exllamav3.conversion import ConversionOptions, convert
from exllamav3.conversion.replicas import Replicas
from tiny_models import llama_config, load_model

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.codec.params import Codebook
from exllamav3.modules.attention import Attention
from exllamav3.quant import QuantSettings, make_hessian, quantize_linear

pytestmark = pytest.mark.cuda

PLAN = Path(__file__).parents[2] / "examples" / "tiny-plan.json"
FUSED_LAYER = next(
    row["layer"]
    for row in json.loads(PLAN.read_text())["layers"]
    if row["variant"] == "fused_uniform"
)


class Routes:
    """Listens to `Replicas.advance`: the routes that attention took, by device."""

    def __init__(self, monkeypatch):
        self.taken = {}
        advance = Replicas.advance

        def spy(replicas, index, rows, *rest):
            moved = advance(replicas, index, rows, *rest)
            for top, device in zip(replicas.modules(index), replicas.devices, strict=True):
                for part in top:
                    if isinstance(part, Attention):
                        self.taken.setdefault((part.key, str(device)), Counter()).update(
                            part.routes
                        )
            return moved

        monkeypatch.setattr(Replicas, "advance", spy)


def convert_example(example_model, root, *devices, rows=16):
    options = ConversionOptions(
        in_dir=str(example_model),
        work_dir=str(root / "work"),
        out_dir=str(root / "out"),
        bits=4.0,
        head_bits=6,
        cal_rows=rows,
        cal_cols=256,
        devices=devices,
    )
    return convert(options, str(PLAN))


def errors(result):
    """Proxy error of every linear, by key."""
    return {
        linear.key: linear.proxy_error for module in result.modules for linear in module.linears
    }


def ratios(one, other):
    """Proxy errors of one conversion over those of another, which has the same linears."""
    first, second = errors(one), errors(other)
    assert list(first) == list(second)
    return torch.tensor([first[key] / second[key] for key in first])


@pytest.fixture(scope="module")
def on_one_gpu(example_model, tmp_path_factory):
    return convert_example(example_model, tmp_path_factory.mktemp("gpu"), "cuda:0")


def test_proxy_errors_are_within_one_percent_of_the_cpu(example_model, tmp_path, on_one_gpu):
    threads = torch.get_num_threads()
    torch.set_num_threads(min(8, os.cpu_count() or 1))  # the matrices are too small for more
    try:
        on_cpu = convert_example(example_model, tmp_path, "cpu")
    finally:
        torch.set_num_threads(threads)
    found = ratios(on_one_gpu, on_cpu)
    print(f"\n{len(found)} linears, GPU / CPU: mean {found.mean():.4f}, {found.aminmax()}")
    # Other rings of the same quality: single matrices of 65,536 weights scatter, the sum must not.
    assert abs(float(found.log().mean())) < 0.01
    assert sum(errors(on_one_gpu).values()) / sum(errors(on_cpu).values()) < 1.01
    assert float(found.max()) < 1.05


def test_the_same_job_on_a_gpu_gives_the_same_bytes(example_model, tmp_path, on_one_gpu):
    again = convert_example(example_model, tmp_path, "cuda:0")
    assert folder_bytes(again.out_dir) == folder_bytes(on_one_gpu.out_dir)


@pytest.mark.two_gpus
def test_two_gpus_share_the_rows_and_give_the_quality_of_one(
    example_model, tmp_path, on_one_gpu, monkeypatch
):
    """Not its bytes: each GPU sums the second moments of its rows, and the two sums are added.

    Their last bits differ, and with them some rings: single proxy errors by half a percent, the
    mean by a thousandth. The same two GPUs always agree.
    """
    routes = Routes(monkeypatch)
    both = convert_example(example_model, tmp_path / "a", "cuda:0", "cuda:1")
    for device in ("cuda:0", "cuda:1"):
        taken = routes.taken[FUSED_LAYER, device]
        assert taken["fused"] > 0, f"{device} never advanced rows through the fused block"
        # The dense block, all split, is only run for its Hessians, by `observe`.
        assert set(taken) == {"fused"}
    found = ratios(both, on_one_gpu)
    print(f"\ntwo GPUs / one: mean {found.mean():.5f}, {found.aminmax()}")
    assert abs(float(found.log().mean())) < 1e-3
    assert float((found - 1).abs().max()) < 0.03
    again = convert_example(example_model, tmp_path / "b", "cuda:0", "cuda:1")
    assert folder_bytes(again.out_dir) == folder_bytes(both.out_dir)


@pytest.mark.two_gpus
def test_a_job_on_the_second_gpu_gives_the_bytes_of_the_first(example_model, tmp_path, on_one_gpu):
    second = convert_example(example_model, tmp_path, "cuda:1")
    ours, theirs = (folder_bytes(r.out_dir) for r in (second, on_one_gpu))
    assert ours == theirs
    assert torch.cuda.current_device() == 0


def peak_of(function):
    """Bytes of GPU memory that a call needs at most, beyond what is in use before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_conversion_never_holds_more_than_one_module(tmp_path):
    """The peak of eight blocks is that of two."""
    peaks = []
    for layers in (2, 8):
        config = llama_config(num_hidden_layers=layers, hidden_size=256, intermediate_size=512)
        source = write_source(tmp_path / f"source{layers}" / "model", config)
        options = job_options(source, tmp_path / str(layers), bits=2.0, devices=("cuda:0",))
        peaks.append(peak_of(lambda options=options: convert(options)))
    assert peaks[1] <= 1.01 * peaks[0]


@pytest.mark.parametrize(
    ("k", "n", "bits", "vector_bytes"),
    [(5120, 14336, 4, 4096 * 129 * 2), (8192, 2048, 8, 256 * 257 * 2)],
)
def test_quantizing_a_matrix_needs_the_memory_that_is_documented(k, n, bits, vector_bytes):
    weight = torch.randn(k, n, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    hessian = make_hessian(torch.eye(k, device="cuda") + 0.1, 10 * k, seed=0)
    settings = QuantSettings(bits, Codebook.MUL1)
    quantize_linear(weight, hessian, settings)  # workspaces of libraries are made once
    peak = peak_of(lambda: quantize_linear(weight, hessian, settings))
    # exllamav3/quant/quantize.py, with c = n
    kept = 2 * k * n + bits * k * n / 8
    searching = vector_bytes * 1536
    coding = 12 * k * n + 8 * k**2 + vector_bytes * n / 16
    refitting = 18 * k * n + 12 * k**2
    expected = kept + max(searching, coding, refitting)
    print(f"\n{k} x {n}: {peak / 1e9:.2f} GB, documented {expected / 1e9:.2f}")
    assert peak < 1.15 * expected


def test_loading_needs_the_memory_of_the_model_and_one_tensor(on_one_gpu):
    loaded = []
    peak = peak_of(lambda: loaded.append(load_model(on_one_gpu.out_dir, "cuda")))
    held = torch.cuda.memory_allocated()
    loaded.clear()
    sizes = tensor_sizes(on_one_gpu.out_dir)
    held -= torch.cuda.memory_allocated()
    # Small tensors take a whole allocation of 512 bytes each; norms are widened to float32.
    assert held < 1.05 * sum(sizes) + 2048 * len(sizes)
    assert peak <= held + 2 * max(sizes) + 512


def tensor_sizes(folder):
    """Bytes of every stored tensor."""
    files = TensorFiles(folder)
    return [files.get(name).numel() * files.get(name).element_size() for name in files.names()]


def test_memory_is_given_back_after_a_job(tmp_path):
    source = write_source(tmp_path / "source", llama_config(intermediate_size=128))
    held = []
    for name in ("a", "b", "c"):
        convert(job_options(source, tmp_path / name, devices=("cuda:0",)))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert all(later <= earlier for earlier, later in pairwise(held[1:]))
