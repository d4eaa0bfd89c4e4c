"""The CUDA tile quantizer: quality, closed rings, independence of batch, stream and chunks."""

import pytest
import torch
from safetensors.torch import load_file

from exllamav3.codec.params import Codebook
from exllamav3.ops import pack, quantize_tiles, unpack
from exllamav3.ops.reference.codebook import codebook_values

pytestmark = pytest.mark.cuda


def random_tiles(count: int, seed: int = 0, scale: float = 0.9) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, 256, generator=generator) * scale).cuda()


def assert_closed(states: torch.Tensor, bits: int) -> None:
    state = states.long() & 0xFFFF
    follows = (state.roll(1, 1) << bits | state & ((1 << bits) - 1)) & 0xFFFF
    assert torch.equal(follows, state)


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_within_half_a_percent_of_the_stored_results(data_dir, bits, codebook):
    stored = load_file(data_dir / "tile_search.safetensors")
    tiles = stored["tiles"].cuda()
    values, states = quantize_tiles(tiles, bits, codebook)
    assert_closed(states, bits)
    found = (values.double() - tiles).square().mean()
    assert found <= 1.005 * stored["mse"][bits - 1, codebook.id].double().mean()


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
@pytest.mark.parametrize("bits", range(1, 9))
def test_values_are_the_codebook_values_of_the_states_and_states_survive_packing(bits, codebook):
    values, states = quantize_tiles(random_tiles(3), bits, codebook)
    expected = codebook_values(codebook.id)[states.cpu().long() & 0xFFFF].float()
    assert torch.equal(values.cpu(), expected)
    assert torch.equal(unpack(pack(states.cpu()[None], bits))[0], states.cpu())


@pytest.mark.parametrize("scale", [0.7, 0.9, 1.1])  # the last has targets beyond the codebook
@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_that_of_the_cpu_search(bits, codebook, scale):
    tiles = random_tiles(64, seed=3, scale=scale)
    on_cpu = (quantize_tiles(tiles.cpu(), bits, codebook)[0] - tiles.cpu()).square().mean(1)
    on_gpu = (quantize_tiles(tiles, bits, codebook)[0] - tiles).square().mean(1).cpu()
    assert on_gpu.mean() / on_cpu.mean() - 1 < 0.005
    if bits >= 7:  # nearly the same ring; with fewer bits single tiles may close another way
        assert (on_gpu / on_cpu - 1).max() < 0.1


@pytest.mark.parametrize("bits", range(1, 9))
def test_hostile_tiles_give_closed_rings_of_finite_values(bits):
    tiles = random_tiles(9)
    tiles[0] = 0
    tiles[1] = torch.nan
    tiles[2] = torch.inf
    tiles[3, ::3] = -torch.inf
    tiles[4, ::2], tiles[4, 1::2] = 3e38, -3e38
    tiles[5] = 1e-42
    tiles[6] *= 1e6
    tiles[7, 11] = torch.nan
    values, states = quantize_tiles(tiles, bits, 1)
    assert_closed(states, bits)
    assert values.isfinite().all()
    assert torch.equal(states[0], states[1])  # NaN counts as 0
    assert values[2].mean() > 1.5


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 2, 3, 265])
def test_a_tile_does_not_depend_on_its_neighbours(bits, count):
    scale = 1.0  # with targets beyond the codebook: the rarest branch
    tiles = random_tiles(600, seed=1, scale=scale)
    whole = quantize_tiles(tiles, bits, 2)[1]
    assert torch.equal(quantize_tiles(tiles[5 : 5 + count], bits, 2)[1], whole[5 : 5 + count])


@pytest.mark.parametrize("bits", [2, 4])
def test_chunks_of_a_large_call_join_without_a_seam(bits):
    tiles = random_tiles(3000, seed=2)
    whole = quantize_tiles(tiles, bits, 2)[1]
    assert_closed(whole, bits)
    assert torch.equal(quantize_tiles(tiles[1100:1400], bits, 2)[1], whole[1100:1400])


def test_no_tiles_and_strided_tiles():
    assert quantize_tiles(random_tiles(0), 4, 2)[1].shape == (0, 256)
    strided = random_tiles(3).repeat_interleave(2, 1)[:, ::2]
    expected = quantize_tiles(strided.contiguous(), 6, 2)[1]
    assert torch.equal(quantize_tiles(strided, 6, 2)[1], expected)


def test_a_captured_graph_replays_on_new_tiles_and_a_side_stream_is_respected():
    tiles = random_tiles(40)
    quantize_tiles(tiles, 4, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, states = quantize_tiles(tiles, 4, 2)
    other = random_tiles(40, seed=9)
    tiles.copy_(other)
    graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = quantize_tiles(other, 4, 2)[1]
    stream.synchronize()
    assert torch.equal(states, expected)


def test_opcheck_passes():
    torch.library.opcheck(torch.ops.exllamav3.quantize_tiles.default, (random_tiles(4), 5, 0))
