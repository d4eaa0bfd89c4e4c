"""Between matrices and tiles in ring order."""

import pytest
import torch

from exllamav3.codec.params import (
    HADAMARD_BLOCK,
    TILE,
    Codebook,
    bits_of_trellis,
    pad_to_block,
)
from exllamav3.codec.tensor import PAYLOAD
from exllamav3.codec.tiles import (
    matrix_from_tiles,
    tile_to_ring,
    tiles_from_matrix,
)
from exllamav3.errors import FormatError
from exllamav3.ops import decode, unpack
from exllamav3.ops.reference.codebook import codebook_values
from exllamav3.topology import schema
from exllamav3.util.rates import INTEGER_BITS


@pytest.mark.parametrize(
    ("step", "row", "column"),
    [(0, 0, 0), (1, 1, 0), (2, 8, 0), (4, 0, 8), (8, 2, 0), (255, 15, 15)],
)
def test_steps_are_where_the_format_says(step, row, column):
    assert matrix_from_tiles(torch.arange(256).view(1, 1, 256))[row, column] == step


def test_a_matrix_and_its_tiles_undo_each_other():
    matrix = torch.randn(48, 80)
    tiles = tiles_from_matrix(matrix)
    assert tiles.shape == (3, 5, 256)
    assert torch.equal(tiles[1, 2], tile_to_ring(matrix[16:32, 32:48]))
    assert torch.equal(matrix_from_tiles(tiles), matrix)
    assert matrix_from_tiles(tiles).is_contiguous()


def test_decoding_is_the_codebook_of_the_states_put_in_place():
    trellis = torch.randint(-32768, 32768, (2, 3, 48)).to(torch.int16)
    values = codebook_values(1)[unpack(trellis).long() & 0xFFFF]
    assert torch.equal(matrix_from_tiles(values), decode(trellis, Codebook.MCG))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiles_from_matrix(torch.zeros(17, 16)), r"shape \(17, 16\)"),
        (lambda: tiles_from_matrix(torch.zeros(16)), r"shape \(16,\)"),
        (lambda: matrix_from_tiles(torch.zeros(4, 256)), r"expected \(k/16, n/16, 256\)"),
        (lambda: matrix_from_tiles(torch.zeros(1, 1, 255)), r"expected \(k/16, n/16, 256\)"),
        (lambda: tile_to_ring(torch.zeros(16, 8)), r"expected \(..., 16, 16\)"),
    ],
)
def test_wrong_shapes_are_named(call, message):
    with pytest.raises(FormatError, match=message):
        call()


def test_a_trellis_has_one_of_eleven_rates():
    legal = []
    for words in range(160):
        try:
            legal.append(bits_of_trellis(words))
        except FormatError:
            continue
    assert legal == [1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8]


def test_the_topology_package_repeats_the_format_correctly():
    written = [book for book in Codebook if book.marker is not None]
    assert {book.value: book.multiplier for book in written} == schema.MULTIPLIERS
    assert (schema.TILE, schema.HADAMARD_BLOCK, schema.PAYLOAD) == (TILE, HADAMARD_BLOCK, PAYLOAD)
    assert {schema.MIN_BITS, schema.MAX_BITS} <= set(INTEGER_BITS)
    for width in (1, 127, 128, 129, 4096):
        assert schema.pad_to_block(width) == pad_to_block(width)


@pytest.mark.parametrize(("size", "padded"), [(1, 128), (128, 128), (129, 256), (576, 640)])
def test_sizes_are_padded_to_whole_blocks(size, padded):
    assert pad_to_block(size) == padded


def test_codebooks_are_found_by_name():
    for codebook in Codebook:
        assert Codebook.from_name(codebook.value) is codebook
    with pytest.raises(FormatError, match="'4inst' is unknown"):
        Codebook.from_name("4inst")
