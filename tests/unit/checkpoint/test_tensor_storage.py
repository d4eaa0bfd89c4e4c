import json

import pytest

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.checkpoint.tensor_storage import ModuleStorage, check_storage
from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta

KEY = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(data_dir):
    return data_dir / "interop" / "quantized" / "tiny-qwen3-4bpw-mcg-always"


@pytest.fixture
def storage(folder):
    return json.loads((folder / "quantization_config.json").read_text())["tensor_storage"]


@pytest.fixture
def inventory(folder):
    return TensorFiles(folder).inventory()


def test_entries_derived_from_tensors_equal_those_of_the_established_library(storage, inventory):
    for key, entry in storage.items():
        held = {name: inventory[name] for name in entry["stored_tensors"]}
        assert ModuleStorage.from_tensors(key, held).to_obj() == entry


def test_an_inventory_that_matches_passes(storage, inventory):
    check_storage(storage, inventory, "quantization_config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("bits_per_weight", 5), ("mcg_multiplier", 1), ("quant_format", "exl2")],
)
def test_an_entry_that_contradicts_the_tensors_is_refused(storage, inventory, field, value):
    storage[KEY][field] = value
    with pytest.raises(FormatError, match=f"{field}: says {value!r}"):
        check_storage(storage, inventory, "quantization_config.json.tensor_storage")


def test_a_wrong_shape_is_refused(storage, inventory):
    storage[KEY]["stored_tensors"][f"{KEY}.suh"]["shape"] = [128]
    with pytest.raises(FormatError, match="stored_tensors: says"):
        check_storage(storage, inventory, "x")


def test_a_tensor_that_no_shard_holds_is_refused(storage, inventory):
    storage[KEY]["stored_tensors"]["other.weight"] = {}
    with pytest.raises(FormatError, match=r"lists tensor other\.weight, which no shard holds"):
        check_storage(storage, inventory, "x")


@pytest.mark.parametrize("obj", [[], {"a": 1}, {"a": {"stored_tensors": []}}])
def test_a_malformed_inventory_is_refused(obj, inventory):
    with pytest.raises(FormatError, match="expected an object"):
        check_storage(obj, inventory, "x")


def test_a_half_rate_is_written_as_a_fraction():
    held = {
        "a.trellis": TensorMeta((8, 8, 40), "I16"),
        "a.mul1": TensorMeta((), "I32"),
    }
    assert ModuleStorage.from_tensors("a", held).to_obj()["bits_per_weight"] == 2.5
