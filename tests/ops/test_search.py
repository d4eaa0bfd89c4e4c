"""The tile quantizer: quality against stored results, closed rings, hostile tiles."""

import pytest
import torch
from safetensors.torch import load_file

from exllamav3.codec.params import Codebook
from exllamav3.errors import FormatError
from exllamav3.ops import backend, build_info, pack, quantize_tiles, unpack
from exllamav3.ops.reference import search as reference
from exllamav3.ops.reference.codebook import codebook_values

NATIVE = backend("quantize_tiles", "cpu") == "native"
ISAS = ["portable", "avx2", "avx512"]
AVAILABLE = ISAS[: ISAS.index(build_info()["isa"]) + 1] if NATIVE else []


def random_tiles(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * scale


def hostile_tiles() -> torch.Tensor:
    tiles = torch.zeros(6, 256)
    tiles[1] = torch.nan
    tiles[2] = torch.inf
    tiles[3, ::3] = -torch.inf
    tiles[4, ::2], tiles[4, 1::2] = 3e38, -3e38
    tiles[5] = 1e-42
    return tiles


def assert_closed(states: torch.Tensor, bits: int) -> None:
    """Every state continues the one before it, the first one the last."""
    state = states.long() & 0xFFFF
    follows = (state.roll(1, 1) << bits | state & ((1 << bits) - 1)) & 0xFFFF
    assert torch.equal(follows, state)


@pytest.mark.parametrize("codebook", list(Codebook), ids=lambda c: c.value)
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_within_half_a_percent_of_the_stored_results(data_dir, bits, codebook):
    stored = load_file(data_dir / "tile_search.safetensors")
    count = 64 if NATIVE else 4
    tiles = stored["tiles"][:count]
    values, states = quantize_tiles(tiles, bits, codebook)
    assert_closed(states, bits)
    found = (values.double() - tiles).square().mean()
    # Single tiles differ by a few percent either way; only all 64 make a sharp comparison.
    allowed = 1.005 if NATIVE else 1.06
    assert found <= allowed * stored["mse"][bits - 1, codebook.id, :count].double().mean()


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_values_are_the_codebook_values_of_the_states_and_states_survive_packing(bits):
    values, states = quantize_tiles(random_tiles(2), bits, Codebook.MUL1)
    expected = codebook_values(Codebook.MUL1.id)[states.long() & 0xFFFF].float()
    assert torch.equal(values, expected)
    assert torch.equal(unpack(pack(states[None], bits))[0], states)


@pytest.mark.parametrize("bits", range(1, 9))
def test_hostile_tiles_give_closed_rings_of_finite_values(bits):
    values, states = quantize_tiles(hostile_tiles(), bits, Codebook.MCG)
    assert_closed(states, bits)
    assert values.isfinite().all()
    assert torch.equal(states[0], states[1])  # NaN counts as 0
    assert values[2].mean() > 1.5  # out of range: large values, as far as the ring has them


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_instruction_set_gives_the_bits_of_the_reference(monkeypatch, bits):
    torch.set_num_threads(1)  # the reference consists of small operators
    # 9 tiles: two groups of four and a single one. At K = 1 some of them need the second search.
    tiles = torch.cat([random_tiles(2, seed=bits), random_tiles(1, scale=4.0), hostile_tiles()])
    expected_values, expected_states = reference.quantize_tiles(tiles, bits, 0)
    for isa in AVAILABLE:
        monkeypatch.setenv("EXLLAMAV3_ISA", isa)
        values, states = quantize_tiles(tiles, bits, Codebook.INST3)
        assert torch.equal(states, expected_states), isa
        assert torch.equal(values, expected_values), isa


@pytest.mark.parametrize("bits", [1, 5])
def test_result_depends_neither_on_threads_nor_on_the_other_tiles(bits):
    tiles = random_tiles(11, seed=5)
    torch.set_num_threads(1)
    alone = torch.cat([quantize_tiles(tile[None], bits, 2)[1] for tile in tiles])
    together = quantize_tiles(tiles, bits, 2)[1]
    torch.set_num_threads(3)
    threaded = quantize_tiles(tiles, bits, 2)[1]
    assert torch.equal(alone, together)
    assert torch.equal(threaded, together)


def test_no_tiles_give_no_rings():
    values, states = quantize_tiles(torch.zeros(0, 256), 4, Codebook.MUL1)
    assert values.shape == states.shape == (0, 256)
    assert (values.dtype, states.dtype) == (torch.float32, torch.int16)


def test_a_strided_input_is_read_correctly():
    strided = random_tiles(3).repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(
        quantize_tiles(strided, 6, 2)[1], quantize_tiles(strided.contiguous(), 6, 2)[1]
    )


@pytest.mark.parametrize(
    ("tiles", "bits", "codebook", "message"),
    [
        (torch.zeros(2, 256, dtype=torch.float16), 4, 2, "tiles is float16, expected float32"),
        (torch.zeros(2, 255), 4, 2, r"expected \(T, 256\)"),
        (torch.zeros(256), 4, 2, "expected 2 dimensions"),
        (torch.zeros(2, 256), 0, 2, "bits is 0"),
        (torch.zeros(2, 256), 9, 2, "bits is 9"),
        (torch.zeros(2, 256), 2.5, 2, "half-integer rates are read, never written"),
        (torch.zeros(2, 256), 4, 3, "codebook 3 is unknown"),
    ],
)
def test_arguments_are_checked_before_any_search(tiles, bits, codebook, message):
    with pytest.raises(FormatError, match=message):
        quantize_tiles(tiles, bits, codebook)


def test_operator_declares_what_it_does():
    torch.library.opcheck(torch.ops.exllamav3.quantize_tiles.default, (random_tiles(1), 6, 2))
