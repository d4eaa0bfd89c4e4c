"""A model on a device that is not the current one: kernels, routes, caches and graphs follow it."""

import pytest
import torch
from fake_model import byte_tokenizer, run_jobs
from tiny_models import load_model, qwen35_config, random_exl3, random_tensors, write_folder

from exllamav3 import Cache, Generator, Job, ops
from exllamav3.generator import GreedySampler
from exllamav3.topology import Projection, ResolvedTopology, TopologyRow

pytestmark = [pytest.mark.cuda, pytest.mark.two_gpus]

LAYER = "model.layers.1.self_attn"
FUSED = ResolvedTopology(
    (TopologyRow(LAYER, (256, 64, 64), (Projection("qkv_proj", 4, "mul1", "always"),)),)
)


@pytest.fixture(params=["split", "fused"])
def folder(request, tmp_path):
    """A delta net and an attention block of random payloads; the latter split, or fused."""
    config = qwen35_config(max_position_embeddings=1024)
    topology = FUSED if request.param == "fused" else None
    tensors = random_tensors(
        config,
        topology=topology,
        quantize=lambda part: random_exl3(part.key, part.in_features, part.out_features),
    )
    quantization = {"quant_method": "exl3", "version": "1", "bits": 4.0, "head_bits": 4}
    if topology is not None:
        quantization["exl3_qkv_topology"] = topology.to_obj()
    return write_folder(tmp_path, config | {"quantization_config": quantization}, tensors)


@pytest.fixture(autouse=True)
def _the_current_device_stays():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_a_model_on_the_second_gpu_gives_the_bits_of_the_first(folder, tokens):
    ids = torch.arange(tokens)[None] * 7 % 120
    here, there = (load_model(folder, device) for device in ("cuda:0", "cuda:1"))
    expected, found = here.forward(ids), there.forward(ids)
    assert found.device == torch.device("cuda:1")
    assert expected.isfinite().all()
    assert torch.equal(found.cpu(), expected.cpu())
    assert here.routes() == there.routes()


@pytest.mark.parametrize("graphs", [True, False])
def test_a_generator_on_the_second_gpu_gives_the_tokens_of_the_first(folder, graphs):
    made = []
    for device in ("cuda:0", "cuda:1"):
        model = load_model(folder, device)
        generator = Generator(model, Cache(model, 2048), byte_tokenizer(), cuda_graphs=graphs)
        jobs = [
            Job(
                [(5 * i + n) % 120 + 2 for i in range(n)],
                16,
                sampler=GreedySampler(),
                ignore_eos=True,
                identifier=n,
            )
            for n in (3, 260)
        ]
        made.append(run_jobs(generator, jobs)[0])
    assert made[0] == made[1]


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_tiles_on_the_second_gpu_get_the_rings_of_the_first(bits):
    tiles = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)) * 0.9
    here, there = (ops.quantize_tiles(tiles.to(f"cuda:{n}"), bits, 2) for n in range(2))
    assert there[1].device == torch.device("cuda:1")
    assert torch.equal(here[1].cpu(), there[1].cpu())
    assert torch.equal(here[0].cpu(), there[0].cpu())
