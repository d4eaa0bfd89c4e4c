"""Random arguments of the operators."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import exllamav3_ext
from exllamav3.codec.params import Codebook
from exllamav3.util.rates import HALF_BITS, INTEGER_BITS

RATES = [(bits, book) for bits in INTEGER_BITS for book in Codebook]
RATES += [(bits, Codebook.MUL1) for bits in HALF_BITS]
"""Every rate with every codebook that goes with it."""

native_only = pytest.mark.skipif(
    bool(exllamav3_ext.native_missing_reason),
    reason="says something of our own kernels; without them torch matmuls serve",
)


class Weight(NamedTuple):
    trellis: Tensor
    suh: Tensor
    svh: Tensor
    bias: Tensor


def random_weight(
    k: int = 256, n: int = 128, bits: float = 4, seed: int = 0, device: str = "cpu"
) -> Weight:
    """A packed weight of random bits; its matrix has entries of about unit size."""
    generator = torch.Generator().manual_seed(seed)
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16)
    suh, svh, bias = (torch.randn(size, generator=generator).half() for size in (k, n, n))
    return Weight(*(tensor.to(device) for tensor in (trellis, suh, svh, bias)))


def random_input(*shape: int, seed: int = 1, device: str = "cpu") -> Tensor:
    """Float32 activations."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


class DeltaInputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def random_delta_inputs(
    batch: int = 2, tokens: int = 5, k_heads: int = 2, v_heads: int = 4, dk: int = 32, dv: int = 48
) -> DeltaInputs:
    """Arguments of the gated delta rule, with unit keys as a model has them."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return DeltaInputs(
        q=torch.nn.functional.normalize(normal(batch, tokens, k_heads, dk), dim=-1) / dk**0.5,
        k=torch.nn.functional.normalize(normal(batch, tokens, k_heads, dk), dim=-1),
        v=normal(batch, tokens, v_heads, dv),
        g=-normal(batch, tokens, v_heads).abs(),
        beta=normal(batch, tokens, v_heads).sigmoid(),
        state=normal(batch, v_heads, dk, dv),
    )


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact result."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
