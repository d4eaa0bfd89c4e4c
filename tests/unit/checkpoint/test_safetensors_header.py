import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from exllamav3.checkpoint.header import read_header
from exllamav3.errors import FormatError

GOOD = {"a": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}}


def write(path, header, data=bytes(8)):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_a_written_file_is_described_as_it_is(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"w": torch.zeros(3, 5, dtype=torch.bfloat16), "s": torch.tensor(7).to(torch.int32)}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {n: (m.shape, m.dtype) for n, m in header.tensors.items()} == {
        "w": ((3, 5), "BF16"),
        "s": ((), "I32"),
    }
    assert header.metadata == {"format": "pt"}


def entry(**changes):
    return {"a": GOOD["a"] | changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{not json", "not JSON"),
        (b"[1]", "expected an object"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (GOOD | {"__metadata__": {"n": 1}}, r"__metadata__\['n'\] is a int, expected a string"),
        (GOOD | {"__metadata__": []}, "__metadata__ is a list"),
        ({"a": {"dtype": "F16"}}, "expected dtype, shape and data_offsets"),
        (entry(dtype="F17"), "dtype 'F17' is unknown"),
        (entry(shape=[2, -2]), "not a list of sizes"),
        (entry(shape=[2, True]), "not a list of sizes"),
        (entry(data_offsets=[0]), "not a pair of byte counts"),
        (entry(shape=[2, 3]), r"8 bytes are stored, but F16 \[2, 3\] takes 12"),
        (entry(data_offsets=[8, 16]), "begins at byte 8 of the data, expected 0"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, message):
    with pytest.raises(FormatError, match=message):
        read_header(write(tmp_path / "x.safetensors", header))


def test_overlapping_tensors_are_refused(tmp_path):
    header = GOOD | {"b": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}}
    with pytest.raises(FormatError, match="tensor b begins at byte 4 of the data, expected 8"):
        read_header(write(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("missing_bytes", [1, 8, 20])
def test_a_truncated_file_is_refused(tmp_path, missing_bytes):
    path = write(tmp_path / "x.safetensors", GOOD)
    path.write_bytes(path.read_bytes()[:-missing_bytes])
    with pytest.raises(FormatError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match="truncated or not safetensors"):
        read_header(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    with pytest.raises(FormatError, match="describes 8 bytes of data, the file holds 9"):
        read_header(write(tmp_path / "x.safetensors", GOOD, bytes(9)))


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "nowhere")
    for name, problem in (
        ("pipe", "no ordinary file"),
        ("folder", "no ordinary file"),
        ("link", "a broken link"),
        ("none", "missing"),
    ):
        with pytest.raises(FormatError, match=rf"{name}\.safetensors: {problem}; fetch or make"):
            read_header(tmp_path / f"{name}.safetensors")


def test_the_header_says_where_in_the_file_each_tensor_is(tmp_path):
    path = write(tmp_path / "x.safetensors", GOOD)
    (name, (start, stop)), *_ = read_header(path).ranges.items()
    assert stop == path.stat().st_size
    assert stop - start == 8
    assert name in GOOD
