"""Native codec kernels against the references, for every instruction set of this machine."""

import pytest
import torch
from samples import RATES, native_only, random_input, random_weight, relative_error

import exllamav3_ext
from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.ops.reference import codec as reference
from exllamav3.ops.reference.codebook import codebook_values
from exllamav3.ops.reference.hadamard import hadamard as reference_hadamard

ISAS = ("portable", "avx2", "avx512")


def available_isas() -> list[str]:
    if exllamav3_ext.native_missing_reason:
        return ["portable"]  # one pass over the references
    return list(ISAS[: ISAS.index(ops.build_info()["isa"]) + 1])


@pytest.fixture(params=available_isas())
def isa(request, monkeypatch):
    monkeypatch.setenv("EXLLAMAV3_ISA", request.param)
    return request.param


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_integer_paths_are_identical_to_the_references(isa, bits, codebook):
    trellis = random_weight(48, 80, bits).trellis
    states = reference.unpack(trellis)
    assert torch.equal(ops.unpack(trellis), states)
    assert torch.equal(ops.pack(states, bits), trellis)
    assert torch.equal(ops.decode(trellis, codebook), reference.decode(trellis, codebook.id))


@pytest.mark.parametrize("codebook", list(Codebook))
def test_all_65536_states_decode_to_the_value_of_the_table(isa, codebook):
    """At K = 8 two symbols make a state, so any pair of states can be neighbours: try them all."""
    states = torch.arange(1 << 16).view(-1, 128)
    high, low = states >> 8, states & 255
    symbols = torch.stack([high, low], -1).flatten(1)  # the state at every odd position
    ring = (symbols.roll(1, -1) << 8 | symbols).to(torch.int32)
    packed = ops.pack(torch.where(ring < 1 << 15, ring, ring - (1 << 16)).to(torch.int16), 8)
    tiles = ops.decode(packed.view(-1, 1, 128), codebook).view(-1, 16, 16).flatten(1)
    values = tiles[:, reference.ring_order()]
    expected = codebook_values(codebook.id)[ring.long()]
    assert torch.equal(values.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_reconstruct_is_the_reference_up_to_float32_rounding(isa, bits, codebook):
    weight = random_weight(256, 384, bits)
    ours = ops.reconstruct(*weight[:3], codebook)
    exact = reference.reconstruct(*weight[:3], codebook.id, torch.float32)
    assert relative_error(ours, exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reconstruct_rounds_its_float32_result_once(dtype):
    weight = random_weight()
    exact = ops.reconstruct(*weight[:3], Codebook.MUL1)
    assert torch.equal(ops.reconstruct(*weight[:3], Codebook.MUL1, dtype), exact.to(dtype))


@pytest.mark.parametrize("shape", [(128,), (0, 128), (1, 256), (3, 5, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hadamard_is_the_reference(isa, shape, dtype):
    x = random_input(*shape).to(dtype)
    pre, post = random_input(shape[-1], seed=3).half(), random_input(shape[-1], seed=4)
    for scales in ((None, None), (pre, None), (None, post), (pre, post)):
        ours = ops.hadamard(x, *scales)
        exact = reference_hadamard(x, *scales)
        assert ours.dtype == dtype
        # One unit in the last place of the result's type, from another order of additions.
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(ours, exact, rtol=tolerance, atol=tolerance)


def test_hadamard_undoes_itself():
    x = random_input(4, 256)
    torch.testing.assert_close(ops.hadamard(ops.hadamard(x)), x, rtol=1e-5, atol=1e-5)


def test_decode_is_the_same_for_a_slice_of_columns_and_for_its_copy():
    trellis = random_weight(64, 256, 3).trellis
    view = trellis[:, 8:16]
    assert not view.is_contiguous()
    assert torch.equal(ops.decode(view, 1), ops.decode(view.clone(), 1))
    assert torch.equal(ops.unpack(view), ops.unpack(view.clone()))


def test_tiles_at_an_odd_address_are_read_correctly():
    trellis = random_weight(16, 16, 1.5).trellis
    storage = torch.zeros(trellis.numel() + 1, dtype=torch.int16)
    odd = storage[1:].view(trellis.shape)
    odd.copy_(trellis)
    assert odd.data_ptr() % 4 == 2
    assert torch.equal(ops.decode(odd, 2), ops.decode(trellis, 2))
    assert torch.equal(ops.unpack(odd), ops.unpack(trellis))
    assert torch.equal(ops.pack(ops.unpack(odd), 1.5), trellis)


def test_states_of_any_shape_are_packed():
    states = ops.unpack(random_weight(32, 48, 5).trellis)
    assert ops.pack(states[0, 0], 5).shape == (80,)
    assert ops.pack(states[:0], 5).shape == (0, 3, 80)
    assert torch.equal(ops.pack(states.transpose(0, 1), 5), ops.pack(states, 5).transpose(0, 1))


def test_an_empty_trellis_decodes_to_an_empty_matrix():
    assert ops.decode(torch.empty(0, 4, 64, dtype=torch.int16), 2).shape == (0, 64)


@native_only
@pytest.mark.parametrize(
    ("value", "message"), [("sse9", "unknown: use portable, avx2 or avx512"), ("", None)]
)
def test_an_unknown_instruction_set_is_refused(monkeypatch, value, message):
    monkeypatch.setenv("EXLLAMAV3_ISA", value)
    trellis = random_weight().trellis
    if message is None:
        ops.decode(trellis, 2)
    else:
        with pytest.raises(RuntimeError, match=message):
            ops.decode(trellis, 2)
