"""Calibration rows: windows of text, packed rows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exllamav3.conversion.calibration import BUNDLED_TEXT, calibration_rows, text_rows
from safetensors.torch import save_file

from exllamav3.errors import ConversionError


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([list(text.encode())])


def rows_of(path: Path | None, rows: int, cols: int, vocab: int = 256) -> torch.Tensor:
    return calibration_rows(Bytes, vocab, rows, cols, None if path is None else str(path))


def test_the_bundled_text_is_large_enough_for_the_defaults_of_a_byte_tokenizer():
    made = rows_of(None, 128, 1024)
    assert made.shape == (128, 1024)
    assert made.dtype == torch.int32


def test_the_bundled_text_comes_with_its_licences():
    folder = BUNDLED_TEXT.parent
    assert "WordNet 3.0 licence" in (folder / "README.md").read_text()
    assert len(list((folder / "licences").iterdir())) == 7


def test_windows_are_spread_over_the_text_without_overlap():
    made = text_rows(torch.arange(100), 3, 10, "text")
    assert made[:, 0].tolist() == [0, 30, 60]
    assert torch.equal(made, made[:, :1] + torch.arange(10, dtype=torch.int32))


def test_all_of_a_text_is_used_when_the_rows_just_fit():
    assert torch.equal(text_rows(torch.arange(31), 3, 10, "text").flatten(), torch.arange(30))


def test_the_same_request_gives_the_same_rows():
    assert torch.equal(rows_of(None, 4, 64), rows_of(None, 4, 64))


def test_a_text_that_is_too_short_says_how_many_rows_fit(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 95)
    with pytest.raises(ConversionError, match=r"short.txt: 95 tokens hold 9 rows .*-cr 9 or fewer"):
        rows_of(path, 10, 10)
    with pytest.raises(ConversionError, match="do not fill one row of 96 tokens"):
        rows_of(path, 1, 96)


def test_packed_rows_are_taken_as_they_are(tmp_path):
    path = tmp_path / "rows.safetensors"
    ids = torch.arange(60, dtype=torch.int64).reshape(5, 12)
    save_file({"input_ids": ids}, path)
    assert torch.equal(rows_of(path, 4, 10), ids[:4, :10].to(torch.int32))


def test_packed_rows_need_no_tokenizer(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"input_ids": torch.zeros(2, 4, dtype=torch.int64)}, path)

    def fail() -> Bytes:
        raise AssertionError("the tokenizer was loaded")

    assert calibration_rows(fail, 8, 2, 4, str(path)).shape == (2, 4)


@pytest.mark.parametrize(
    ("rows", "cols", "message"),
    [(6, 12, "holds 5 rows, asked for 6; use -cr 5"), (5, 13, "have 12 tokens.*use -cc 12")],
)
def test_too_few_packed_rows_are_refused(tmp_path, rows, cols, message):
    path = tmp_path / "rows.safetensors"
    save_file({"input_ids": torch.zeros(5, 12, dtype=torch.int64)}, path)
    with pytest.raises(ConversionError, match=message):
        rows_of(path, rows, cols)


@pytest.mark.parametrize("bad", [256, -1])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, bad):
    path = tmp_path / "rows.safetensors"
    ids = torch.zeros(2, 4, dtype=torch.int64)
    ids[1, 2] = bad
    save_file({"input_ids": ids}, path)
    with pytest.raises(ConversionError, match=f"token id {bad} is outside .* vocabulary of 256"):
        rows_of(path, 2, 4)


def test_malformed_files_are_refused(tmp_path):
    with pytest.raises(ConversionError, match="does not exist"):
        rows_of(tmp_path / "none.txt", 1, 4)
    binary = tmp_path / "image.png"
    binary.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConversionError, match="not UTF-8"):
        rows_of(binary, 1, 4)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"123")
    with pytest.raises(ConversionError, match="not a safetensors file"):
        rows_of(broken, 1, 4)
    other = tmp_path / "other.safetensors"
    save_file({"ids": torch.zeros(2, 4)}, other)
    with pytest.raises(ConversionError, match=r"no tensor input_ids .found ids."):
        rows_of(other, 1, 4)
    floats = tmp_path / "floats.safetensors"
    save_file({"input_ids": torch.zeros(2, 4)}, floats)
    with pytest.raises(ConversionError, match="expected an integer tensor"):
        rows_of(floats, 1, 4)


@pytest.mark.parametrize("token", [2**32, 2**32 + 5, -(2**32), 2**62])
def test_ids_that_would_wrap_around_into_the_vocabulary_are_refused(tmp_path, token):
    path = tmp_path / "rows.safetensors"
    save_file({"input_ids": torch.full((2, 4), token)}, path)
    with pytest.raises(ConversionError, match="outside the model's vocabulary"):
        rows_of(path, 2, 4)


def test_packed_rows_without_a_row_are_named(tmp_path):
    path = tmp_path / "rows.safetensors"
    save_file({"input_ids": torch.zeros(0, 24, dtype=torch.int64)}, path)
    with pytest.raises(ConversionError, match="holds 0 rows, asked for 2; the file is empty"):
        calibration_rows(lambda: None, 100, 2, 16, str(path))
