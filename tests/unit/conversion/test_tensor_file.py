"""Streaming safetensors writer: readable by others, aligned, atomic."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path

import pytest
import torch
from exllamav3.conversion.tensor_file import PendingTensor, write_tensor_file
from safetensors import safe_open
from safetensors.torch import load_file

from exllamav3.errors import ConversionError, FormatError


def sample() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "a.trellis": torch.randint(-9, 9, (2, 3, 16), generator=generator).to(torch.int16),
        "a.mul1": torch.tensor(-2082680531, dtype=torch.int32),
        "a.suh": torch.randn(7, generator=generator).half(),
        "wide": torch.randn(2, 2, generator=generator),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False, True]),
        "noncontiguous": torch.arange(12).reshape(3, 4).T,
    }


def pending(tensors: dict[str, torch.Tensor]) -> list[PendingTensor]:
    return [PendingTensor.of(name, tensor) for name, tensor in tensors.items()]


def test_the_safetensors_library_reads_back_every_tensor(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, pending(sample()), {"format": "pt"})
    found = load_file(path)
    assert found.keys() == sample().keys()
    for name, tensor in sample().items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_without_metadata_the_header_has_none(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, pending(sample()))
    with safe_open(path, "pt") as file:
        assert file.metadata() is None


def test_every_tensor_is_aligned_to_its_width_and_the_data_to_eight_bytes(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensor_file(path, pending(sample()))
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    assert length % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        assert entry["data_offsets"][0] % sample()[name].element_size() == 0


def test_the_order_in_which_tensors_are_handed_over_does_not_matter(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    write_tensor_file(one, pending(sample()))
    write_tensor_file(two, pending(sample())[::-1])
    assert one.read_bytes() == two.read_bytes()


def test_tensors_are_fetched_one_at_a_time(tmp_path):
    alive: list[str] = []

    def fetch(name: str) -> torch.Tensor:
        alive.append(name)
        return torch.zeros(4)

    tensors = [PendingTensor(n, "F32", (4,), lambda n=n: fetch(n)) for n in ("b", "a")]
    assert alive == []
    write_tensor_file(tmp_path / "x", tensors)
    assert alive == ["a", "b"]


def test_a_tensor_that_is_not_what_was_announced_is_refused(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(FormatError, match=r"tensor t is torch.float32 \[3\], the header says F32"):
        write_tensor_file(path, [PendingTensor("t", "F32", (4,), lambda: torch.zeros(3))])
    assert not path.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_and_says_that_resuming_is_safe(tmp_path, code):
    path = tmp_path / "x"
    write_tensor_file(path, pending({"old": torch.zeros(2)}))
    before = path.read_bytes()

    def fail(name: str) -> None:
        raise OSError(code, "No space left on device")

    with pytest.raises(ConversionError, match=r"no space left.*--resume"):
        write_tensor_file(path, pending(sample()), step=fail)
    assert path.read_bytes() == before


def test_other_errors_pass_through_and_leave_the_old_file(tmp_path):
    path: Path = tmp_path / "x"
    write_tensor_file(path, pending({"old": torch.zeros(2)}))
    before = path.read_bytes()

    def fail(name: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        write_tensor_file(path, pending(sample()), step=fail)
    assert path.read_bytes() == before
