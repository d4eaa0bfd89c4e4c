"""The global scale search."""

from __future__ import annotations

import pytest
import torch

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.codec.tiles import tiles_from_matrix
from exllamav3.quant.scale_search import (
    FLOOR,
    PRIOR,
    gather_tiles,
    sample_positions,
    search_scale,
)


def parabola(best, width=1.0):
    """A stand-in quantizer whose error is lowest at scale `best`."""

    def quantize(tiles, bits, codebook):
        # Tiles of the test are all ones, so a scaled tile shows its scale.
        scale = tiles[:, :1]
        wrong = 1 + width * (scale - best)
        return tiles * wrong, None

    return quantize


@pytest.mark.parametrize("best", [0.12, 0.3, 0.71, 0.74, 0.9, 2.0])
def test_the_minimum_is_found_wherever_it_is(monkeypatch, best):
    monkeypatch.setattr(ops, "quantize_tiles", parabola(best))
    found = search_scale(torch.ones(16, 256), 4, Codebook.MUL1)
    assert found == pytest.approx(best, abs=0.01)


def test_the_floor_is_respected(monkeypatch):
    monkeypatch.setattr(ops, "quantize_tiles", parabola(-1.0))
    assert search_scale(torch.ones(16, 256), 4, Codebook.MUL1) == FLOOR


def test_one_call_of_three_candidates_serves_an_ordinary_weight(monkeypatch):
    calls = []

    def counting(tiles, bits, codebook):
        calls.append(len(tiles))
        return parabola(0.74)(tiles, bits, codebook)

    monkeypatch.setattr(ops, "quantize_tiles", counting)
    search_scale(torch.ones(16, 256), 4, Codebook.MUL1)
    assert calls == [3 * 16]


def test_gaussian_tiles_find_the_scale_near_the_prior():
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(16, 256, generator=generator) * 1.2437
    found = search_scale(tiles, 4, Codebook.MUL1)
    assert found == pytest.approx(PRIOR[Codebook.MUL1], abs=0.07)


def test_samples_are_distinct_sorted_and_repeatable():
    positions = sample_positions(56, 56, seed=3)
    assert len(positions) == 56 * 56 // 24
    assert positions.diff().gt(0).all()
    assert torch.equal(positions, sample_positions(56, 56, seed=3))
    assert not torch.equal(positions, sample_positions(56, 56, seed=4))


def test_small_grids_are_sampled_whole():
    assert torch.equal(sample_positions(4, 8, seed=0), torch.arange(32))


def test_gathered_tiles_are_those_of_the_grid():
    matrix = torch.randn(48, 64)
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 2])
    picked = gather_tiles(matrix, rows, columns)
    assert torch.equal(picked, tiles_from_matrix(matrix)[rows, columns])
