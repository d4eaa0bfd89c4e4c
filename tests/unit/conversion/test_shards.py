"""Shards: packing by module, names, index; and the folder they go to."""

from __future__ import annotations

import json

import pytest
import torch
from exllamav3.conversion.output_folder import CLAIM, OutputFolder, side_files
from exllamav3.conversion.shards import (
    OutputGroup,
    plan_shards,
    shard_names,
    write_shards,
)
from exllamav3.conversion.tensor_file import PendingTensor
from safetensors import safe_open

from exllamav3.checkpoint.index import INDEX_NAME
from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError


def group(key: str, *sizes: int) -> OutputGroup:
    """Tensors of the given numbers of bytes."""
    tensors = [
        PendingTensor.of(f"{key}.{i}", torch.full((size,), i, dtype=torch.uint8))
        for i, size in enumerate(sizes)
    ]
    return OutputGroup(key, tuple(tensors))


def keys(shards: list[list[OutputGroup]]) -> list[list[str]]:
    return [[part.key for part in shard] for shard in shards]


def test_modules_are_packed_in_order_up_to_the_limit():
    groups = [group("a", 40), group("b", 30, 30), group("c", 10), group("d", 90)]
    assert keys(plan_shards(groups, 100)) == [["a", "b"], ["c", "d"]]


def test_a_module_is_never_cut_even_if_it_exceeds_the_limit():
    groups = [group("a", 10), group("b", 300), group("c", 10)]
    assert keys(plan_shards(groups, 100)) == [["a"], ["b"], ["c"]]


def test_names_follow_the_number_of_shards():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_one_shard_has_no_index(tmp_path):
    write_shards(tmp_path, [group("a", 5)], 100, None, {}, lambda name: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_several_shards_have_an_index_and_all_carry_the_header(tmp_path):
    groups = [group("a", 60), group("b", 60), group("c", 60)]
    write_shards(tmp_path, groups, 100, {"k": "v"}, {"more": {"x": 1}}, lambda name: None)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_size": 180, "more": {"x": 1}}
    assert sorted(index["weight_map"]) == ["a.0", "b.0", "c.0"]
    for name in shard_names(3):
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == {"k": "v"}
    assert sorted(TensorFiles(tmp_path).names()) == ["a.0", "b.0", "c.0"]


def test_an_empty_or_missing_folder_can_be_claimed_once(tmp_path):
    output = OutputFolder(tmp_path / "new" / "out", "job1")
    output.claim()
    assert output.is_ours()
    output.claim()
    with pytest.raises(ConversionError, match="another job has reserved this output folder"):
        OutputFolder(output.path, "job2").claim()
    output.release()
    assert list(output.path.iterdir()) == []


def test_a_folder_that_holds_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"not empty \(it holds config.json\)"):
        OutputFolder(tmp_path, "job").claim()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConversionError, match="is a file"):
        OutputFolder(tmp_path / "out", "job").claim()


def test_clearing_removes_what_a_job_writes_and_nothing_else(tmp_path):
    output = OutputFolder(tmp_path, "job")
    output.claim()
    ours = (
        "model.safetensors.partial", "model.safetensors", "model-00001-of-00012.safetensors",
        INDEX_NAME, "config.json.partial", "quantization_config.json", "README.md",
    )  # fmt: skip
    foreign = ["model-a.safetensors", "notes.txt"]
    for name in (*ours, *foreign):
        (tmp_path / name).write_text("")
    output.clear({"README.md"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [CLAIM, *foreign]


def test_side_files_come_along_except_weights_and_what_is_rewritten(tmp_path):
    for name in (
        "config.json", "tokenizer.json", "README.md", "model-00001-of-00002.safetensors",
        INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json", "m.gguf", "LICENSE",
        "quantization_config.json", "chat_template.jinja", "old.safetensors.partial",
    ):  # fmt: skip
        (tmp_path / name).write_text("")
    (tmp_path / "onnx").mkdir()
    copied, ignored = side_files(tmp_path)
    assert copied == ["LICENSE", "README.md", "chat_template.jinja", "tokenizer.json"]
    assert ignored == ["m.gguf", "pytorch_model.bin", "pytorch_model.bin.index.json"]
