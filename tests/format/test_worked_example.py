"""The example of docs/format.md says what the code does."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from exllamav3 import ops
from exllamav3.codec.params import Codebook
from exllamav3.codec.tiles import matrix_from_tiles

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def example() -> str:
    return DOCUMENT.read_text().split("## Example")[1]


@pytest.fixture(scope="module")
def trellis(example: str) -> torch.Tensor:
    line = re.search(r"^    ((?:[0-9a-f]{2} ?)+)$", example, re.M).group(1)
    tile = bytes.fromhex(line) * 8
    assert len(tile) == 128
    return torch.from_numpy(np.frombuffer(tile, dtype="<i2").copy()).view(1, 1, 64)


def rows_of_the_table(example: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in example.splitlines()]
    return [row for row in rows if row and row[0].isdigit()]


def test_states_of_the_example_are_those_of_the_table(example, trellis):
    states = ops.unpack(trellis).flatten().numpy().view(np.uint16)
    rows = rows_of_the_table(example)
    assert len(rows) == 4
    for row in rows:
        assert f"{states[int(row[0])]:04x}" == row[2]


def test_symbols_of_the_example_count_from_0_to_15(trellis):
    symbols = ops.unpack(trellis).flatten() & 15
    assert torch.equal(symbols, (torch.arange(256) % 16).to(torch.int16))


@pytest.mark.parametrize(("column", "codebook"), [(3, "3inst"), (4, "mcg"), (5, "mul1")])
def test_values_and_places_of_the_example_are_those_of_the_table(
    example, trellis, column, codebook
):
    matrix = ops.decode(trellis, Codebook.from_name(codebook)).numpy().view(np.uint16)
    for row in rows_of_the_table(example):
        place = tuple(int(part) for part in row[1].split(","))
        assert f"{matrix[place]:04x}" == row[column]


def test_places_of_the_example_follow_the_tile_order(example):
    place_of_step = matrix_from_tiles(torch.arange(256).view(1, 1, 256))
    for row in rows_of_the_table(example):
        place = tuple(int(part) for part in row[1].split(","))
        assert int(place_of_step[place]) == int(row[0])
