import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from exllamav3.checkpoint.tensor_files import CheckpointWarning, TensorFiles
from exllamav3.errors import FormatError

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards and an index."""
    save_file({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float16)}, tmp_path / ONE)
    save_file({"c": torch.full((4,), 5.0)}, tmp_path / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


def write_index(folder, weight_map):
    index = {"metadata": {"total_size": 30}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))


def test_tensors_of_all_shards_are_found_by_name(sharded):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files = TensorFiles(sharded)
    assert sorted(files.names()) == ["a", "b", "c"]
    assert torch.equal(files.get("c"), torch.full((4,), 5.0))
    assert files.describe("b").dtype == "F16"
    assert files.file_of("c") == TWO
    assert files.has("a")
    assert not files.has("d")


def test_asking_for_a_tensor_that_is_not_there_names_it(sharded):
    with pytest.raises(FormatError, match="tensor d is missing"):
        TensorFiles(sharded).get("d")


def test_several_files_without_an_index_are_one_checkpoint(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    assert sorted(TensorFiles(tmp_path).names()) == ["a", "b"]


def test_a_listed_shard_that_is_missing_is_an_error(sharded):
    (sharded / TWO).unlink()
    with pytest.raises(FormatError, match=f"{TWO}: missing, but {INDEX} lists"):
        TensorFiles(sharded)


def test_a_shard_missing_from_a_numbered_series_is_an_error_without_an_index(sharded):
    (sharded / INDEX).unlink()
    (sharded / ONE).unlink()
    with pytest.raises(FormatError, match=f"{ONE}: missing, but {TWO} is one of 00002"):
        TensorFiles(sharded)


def test_a_file_that_the_index_does_not_list_is_ignored_with_a_warning(sharded):
    save_file({"a": torch.zeros(9)}, sharded / "consolidated.safetensors")
    with pytest.warns(CheckpointWarning, match=r"consolidated.safetensors: not listed"):
        files = TensorFiles(sharded)
    assert files.describe("a").shape == (2,)


def test_a_tensor_that_the_index_does_not_list_is_ignored_with_a_warning(sharded):
    write_index(sharded, {"a": ONE, "c": TWO})
    with pytest.warns(CheckpointWarning, match="1 tensors are not listed .*: b"):
        files = TensorFiles(sharded)
    assert not files.has("b")


def test_a_tensor_in_two_shards_is_an_error(sharded):
    save_file({"c": torch.ones(4), "a": torch.ones(2)}, sharded / TWO)
    with pytest.raises(FormatError, match=f"tensor a is in two files, {ONE} and {TWO}"):
        TensorFiles(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_an_error(sharded):
    write_index(sharded, {"a": ONE, "b": TWO, "c": TWO})
    with pytest.raises(FormatError, match=f"says it is in {TWO}, it is in {ONE}"):
        TensorFiles(sharded)


def test_a_listed_tensor_that_no_shard_holds_is_an_error(sharded):
    write_index(sharded, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    with pytest.raises(FormatError, match="it is in none of the listed files"):
        TensorFiles(sharded)


@pytest.mark.parametrize(
    "name",
    ["../other/x.safetensors", "", 7, "/etc/passwd", "..", "config.json", "a\0b.safetensors"],
)
def test_an_index_may_not_name_a_file_outside_its_folder(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(FormatError, match=r"expected the name of a \*\.safetensors file in"):
        TensorFiles(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_no_index_is_an_error(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(FormatError, match=r"index\.json"):
        TensorFiles(sharded)


def test_a_folder_without_tensors_is_an_error(tmp_path):
    with pytest.raises(FormatError, match=r"no \*.safetensors file"):
        TensorFiles(tmp_path)


def test_tensors_outlive_the_files_they_came_from(sharded):
    files = TensorFiles(sharded)
    tensor = files.get("c")
    files.close()
    assert torch.equal(tensor, torch.full((4,), 5.0))


def test_a_file_that_vanishes_after_its_header_was_read_is_an_error_with_its_name(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 16)
    with pytest.raises(FormatError, match=r"model\.safetensors: tensor a cannot be read"):
        files.get("a")
