"""Every rate and codebook against a decoder written from the format document alone."""

import numpy as np
import pytest
import torch
from numpy_decoder import inner_matrix, states_of, weight_matrix

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.util.rates import HALF_BITS, INTEGER_BITS

CASES = [(bits, book.value) for bits in INTEGER_BITS for book in Codebook]
CASES += [(bits, "mul1") for bits in HALF_BITS]


def random_weight(bits: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-32768, 32768, (8, 8, int(16 * bits)), generator=generator)
    suh, svh = (torch.randn(128, generator=generator).half() for _ in range(2))
    return trellis.to(torch.int16), suh, svh


@pytest.mark.parametrize(("bits", "codebook"), CASES)
def test_decoded_matrix_is_that_of_the_independent_decoder(bits, codebook):
    trellis, _, _ = random_weight(bits)
    expected = inner_matrix(trellis[:2, :2].numpy(), codebook)
    ours = ops.decode(trellis[:2, :2].contiguous(), Codebook.from_name(codebook))
    assert np.array_equal(ours.numpy().view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("bits", HALF_BITS)
def test_half_rate_states_are_those_of_the_independent_decoder_and_pack_again(bits):
    trellis, _, _ = random_weight(bits)
    states = ops.unpack(trellis)
    assert np.array_equal(states[3, 5].numpy().view(np.uint16), states_of(trellis[3, 5], bits))
    assert torch.equal(ops.pack(states, bits), trellis)


@pytest.mark.parametrize("bits", [*HALF_BITS, 4])
def test_reconstruction_and_product_are_those_of_the_independent_decoder(bits):
    trellis, suh, svh = random_weight(bits)
    exact = weight_matrix(trellis.numpy(), suh.numpy(), svh.numpy(), "mul1")
    weight = ops.reconstruct(trellis, suh, svh, Codebook.MUL1)
    assert np.linalg.norm(weight.numpy() - exact) < 1e-6 * np.linalg.norm(exact)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    y = ops.exl3_linear(x, trellis, suh, svh, None, Codebook.MUL1)
    exact_y = x.double().numpy() @ exact
    assert np.linalg.norm(y.numpy() - exact_y) < 1e-6 * np.linalg.norm(exact_y)
