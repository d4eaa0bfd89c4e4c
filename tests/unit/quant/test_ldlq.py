"""Error feedback around a tile quantizer."""

from __future__ import annotations

import pytest
import torch
from quant_material import GRID, correlated_rows

from exllamav3.codec.params import Codebook
from exllamav3.codec.tiles import matrix_from_tiles
from exllamav3.quant.ldl import block_ldl
from exllamav3.quant.ldlq import quantize_with_feedback, quantize_without_feedback

MUL1 = Codebook.MUL1


def problem(k=256, n=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(k, n, generator=generator)
    x = correlated_rows(4 * k, k, seed)
    metric = x.T @ x / len(x)
    metric += 0.025 * metric.diagonal().mean() * torch.eye(k)
    return target, metric


def objective(target, result, metric):
    error = (target - result).double()
    return float((error * (metric.double() @ error)).sum())


def plain_ldlq(target, factor, quantize):
    """Row blocks from the last to the first without any buffering; the definition."""
    result = torch.zeros_like(target, dtype=torch.float64)
    for row in range(len(target) - 16, -1, -16):
        later = slice(row + 16, None)
        error = target[later].double() - result[later]
        fed = target[row : row + 16] + factor[later, row : row + 16].double().T @ error
        result[row : row + 16] = quantize(fed.float())
    return result


def test_buffered_feedback_equals_the_definition(grid_tiles):
    target, metric = problem()
    factor = block_ldl(metric, 0.025)
    values, _ = quantize_with_feedback(target, factor, 4, MUL1)
    expected = plain_ldlq(target, factor, lambda x: grid_tiles(x, 4, MUL1)[0].double())
    # Rounding may differ where a value sits on the edge between two grid points.
    assert (values.double() - expected).abs().gt(GRID / 2).float().mean() < 0.01
    assert objective(target, values, metric) == pytest.approx(
        objective(target, expected, metric), rel=0.02
    )


def test_feedback_beats_rounding_under_its_metric_and_loses_under_the_plain_one(grid_tiles):
    target, metric = problem(seed=1)
    fed, _ = quantize_with_feedback(target, block_ldl(metric, 0.025), 4, MUL1)
    plain, _ = quantize_without_feedback(target, 4, MUL1)
    assert objective(target, fed, metric) < 0.8 * objective(target, plain, metric)
    assert (target - fed).square().sum() > (target - plain).square().sum()


def test_a_diagonal_metric_reduces_feedback_to_rounding(grid_tiles):
    target, _ = problem(seed=2)
    factor = block_ldl(torch.diag(torch.linspace(1, 2, 256)), 0.025)
    fed, fed_states = quantize_with_feedback(target, factor, 4, MUL1)
    plain, plain_states = quantize_without_feedback(target, 4, MUL1)
    assert torch.equal(fed, plain)
    assert torch.equal(fed_states, plain_states)


def test_tiles_of_columns_do_not_interact(grid_tiles):
    target, metric = problem(n=256, seed=3)
    factor = block_ldl(metric, 0.025)
    whole, _ = quantize_with_feedback(target, factor, 4, MUL1)
    swapped, _ = quantize_with_feedback(target.roll(128, dims=1), factor, 4, MUL1)
    assert torch.equal(swapped.roll(128, dims=1), whole)


def test_values_and_states_belong_together():
    from exllamav3 import ops

    target, metric = problem(k=128, seed=4)
    values, states = quantize_with_feedback(target, block_ldl(metric, 0.025), 3, MUL1)
    assert states.shape == (8, 8, 256)
    decoded = ops.decode(ops.pack(states, 3), MUL1)
    assert torch.equal(decoded.float(), values)


def test_progress_ends_at_one(grid_tiles):
    target, metric = problem(seed=5)
    shares: list[float] = []
    quantize_with_feedback(target, block_ldl(metric, 0.025), 4, MUL1, shares.append)
    assert shares == [0.5, 1.0]
    shares.clear()
    quantize_without_feedback(target, 4, MUL1, shares.append)
    assert shares == [0.5, 1.0]


def test_states_of_every_tile_are_where_its_values_are(grid_tiles, monkeypatch):
    from exllamav3 import ops

    def marking(tiles, bits, codebook):
        values, _ = grid_tiles(tiles, bits, codebook)
        return values, (values / GRID).to(torch.int16)

    monkeypatch.setattr(ops, "quantize_tiles", marking)
    target, metric = problem(n=384, seed=6)
    for values, states in (
        quantize_with_feedback(target, block_ldl(metric, 0.025), 4, MUL1),
        quantize_without_feedback(target, 4, MUL1),
    ):
        assert torch.equal(matrix_from_tiles(states).float() * GRID, values)
