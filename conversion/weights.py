"""Source weights of a target, as they are stored, and the seeds that go with them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.modules.module import TensorSource
from exllamav3.quant import concat_qkv

from .targets import QuantTarget


def read_components(target: QuantTarget, source: TensorSource) -> tuple[Tensor, Tensor | None]:
    """Source weights `(out, in)` of a target, concatenated along outputs in the stored dtype.

    Nothing is rounded or converted: splitting the result gives the source back bit for bit.

    Returns:
        Weight, and the bias `(out,)` or None.
    """
    weights, biases = [], []
    for linear in target.components:
        names = linear.own_names(source.names())
        weights.append(source.get(names[0]))
        if linear.has_bias:
            biases.append(source.get(names[1]))
    weight = weights[0] if len(weights) == 1 else concat_qkv(weights)
    if not biases:
        return weight, None
    return weight, biases[0] if len(biases) == 1 else concat_qkv(biases)


def to_float16(tensor: Tensor, name: str) -> Tensor:
    """Round to float16.

    Raises:
        FormatError: a finite value does not fit.
    """
    half = tensor.to(torch.float16)
    if torch.isinf(half).any() and not torch.isinf(tensor).any():
        raise FormatError(
            f"{name}: largest magnitude {tensor.abs().max().item():.4g} does not fit in float16, "
            f"in which unquantized linears are stored"
        )
    return half


def derive_seed(seed: int, label: str) -> int:
    """A 63-bit seed of its own for each label, so that no order of work changes a result."""
    digest = hashlib.sha256(f"{seed}/{label}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
