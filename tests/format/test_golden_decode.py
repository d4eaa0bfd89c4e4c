"""Decoding against stored results of another implementation of the format, run on a GPU.

`golden_decode.safetensors` holds, for K = 1..8 and the codebooks 0 = 3inst, 1 = mcg,
2 = mul1, a random trellis with scales, its weight in the original basis, and a product.
Of the states and of the matrix in the rotated basis, which must agree bit for bit, only
SHA-256 sums are stored.
"""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from exllamav3 import ops

CASES = [f"k{bits}.cb{codebook}" for bits in range(1, 9) for codebook in range(3)]


@pytest.fixture(scope="module")
def golden(data_dir):
    return load_file(data_dir / "golden_decode.safetensors")


@pytest.fixture(scope="module")
def sums(data_dir):
    return json.loads((data_dir / "golden_decode_sha256.json").read_text())


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.cpu().double() - theirs.double()).norm() / theirs.double().norm())


@pytest.mark.parametrize("case", CASES)
def test_states_and_rotated_matrix_agree_bit_for_bit(golden, sums, case, device):
    trellis, codebook = golden[f"{case}.trellis"].to(device), int(case[-1])
    states, inner = ops.unpack(trellis).cpu(), ops.decode(trellis, codebook).cpu()
    assert (states.dtype, inner.dtype) == (torch.int16, torch.float16)
    assert sha256(states) == sums[f"{case}.states"]
    assert sha256(inner) == sums[f"{case}.inner"]


@pytest.mark.parametrize("case", CASES)
def test_packing_the_states_gives_the_trellis_back(golden, case, device):
    trellis = golden[f"{case}.trellis"].to(device)
    assert torch.equal(ops.pack(ops.unpack(trellis), int(case[1])), trellis)


@pytest.mark.parametrize("case", CASES)
def test_weight_and_product_agree_within_the_rounding_of_the_other_side(golden, case, device):
    names = ("trellis", "suh", "svh", "x")
    trellis, suh, svh, x = (golden[f"{case}.{name}"].to(device) for name in names)
    weight = ops.reconstruct(trellis, suh, svh, int(case[-1]))
    # Theirs is float16, transformed partly in float16: 4.2e-4 from a float32 decode.
    assert relative_error(weight, golden[f"{case}.weight"]) < 5e-4
    y = ops.exl3_linear(x.float(), trellis, suh, svh, None, int(case[-1]))
    # Theirs rounds x * suh and its transform to float16: up to 5.4e-4 from an exact product. A GPU
    # rounds its own transform too.
    assert relative_error(y, golden[f"{case}.y"]) < (6e-4 if device == "cpu" else 8e-4)
