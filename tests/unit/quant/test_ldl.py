"""Block LDL factorisation."""

from __future__ import annotations

import pytest
import torch
from quant_material import correlated_rows

from exllamav3.errors import ConversionError
from exllamav3.quant.ldl import block_ldl


def metric(k: int, seed: int) -> torch.Tensor:
    x = correlated_rows(2 * k, k, seed)
    matrix = x.T @ x / len(x)
    return matrix + 0.01 * matrix.diagonal().mean() * torch.eye(k)


def block_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    blocks = [matrix[i : i + 16, i : i + 16] for i in range(0, len(matrix), 16)]
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("k", [16, 128, 256])
def test_the_factor_reproduces_the_matrix(k):
    matrix = metric(k, seed=0)
    unit = (block_ldl(matrix, 0.025) + torch.eye(k)).double()
    core = torch.linalg.solve(unit, torch.linalg.solve(unit, matrix.double()).T)
    # What is left after removing the unit factors is the block diagonal D.
    assert (core - block_diagonal(core)).norm() / core.norm() < 1e-5
    rebuilt = unit @ block_diagonal(core) @ unit.T
    assert (rebuilt - matrix).norm() / matrix.norm() < 1e-5


def test_the_factor_is_strictly_block_lower():
    factor = block_ldl(metric(128, seed=1), 0.025)
    upper = torch.triu(torch.ones(8, 8)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert not (factor * upper).any()
    assert factor.any()


def test_a_diagonal_matrix_feeds_nothing_back():
    assert not block_ldl(torch.diag(torch.arange(1.0, 129.0)), 0.025).any()


def test_a_slightly_indefinite_matrix_is_damped_until_it_factors():
    matrix = torch.eye(128)
    matrix[0, 0] = -0.2  # needs five rounds of 2 * 0.025
    assert block_ldl(matrix, 0.025).isfinite().all()


def test_a_hopeless_matrix_is_a_clear_error():
    with pytest.raises(ConversionError, match=r"\(128, 128\) has no Cholesky factor even with 10"):
        block_ldl(torch.diag(torch.linspace(-5, 5, 128)), 0.025)
