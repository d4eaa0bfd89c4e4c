"""The orthonormal Hadamard rotation P of 128-channel blocks, as matrix products.

P is symmetric and its own inverse. Source: docs/format.md, "Reconstruction". The products
run in float32 on whole matrices, where a matrix multiplication is faster than butterflies.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from exllamav3.codec.params import HADAMARD_BLOCK


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """Sylvester matrix of order 128 over sqrt(128): float32 ``(128, 128)``, natural order."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < HADAMARD_BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / HADAMARD_BLOCK**0.5).to(device, torch.float32)


def rotate_rows(x_KN: Tensor) -> Tensor:
    """P x: rotate the rows (input channels) of a float32 ``(k, n)`` matrix, k % 128 == 0."""
    k, n = x_KN.shape
    blocks = x_KN.reshape(k // HADAMARD_BLOCK, HADAMARD_BLOCK, n)
    return torch.matmul(hadamard_matrix(x_KN.device), blocks).reshape(k, n)


def rotate_columns(x_KN: Tensor) -> Tensor:
    """x P: rotate the columns (output channels) of a float32 ``(k, n)`` matrix, n % 128 == 0."""
    k, n = x_KN.shape
    blocks = x_KN.reshape(k * (n // HADAMARD_BLOCK), HADAMARD_BLOCK)
    return torch.matmul(blocks, hadamard_matrix(x_KN.device)).reshape(k, n)
