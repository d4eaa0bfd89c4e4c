import json

import pytest
from tiny_models import llama_config, qwen35_config

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.fields import Fields


@pytest.fixture
def fields():
    return Fields(
        {"n": 4, "f": 0.5, "b": True, "s": "x", "l": ["a"], "o": {"k": 1}, "null": None}, "c.json"
    )


class TestFields:
    def test_typed_values_are_given_as_they_are(self, fields):
        assert fields.integer("n") == 4
        assert fields.number("f") == 0.5
        assert fields.number("n") == 4.0
        assert fields.flag("b") is True
        assert fields.text("s") == "x"
        assert fields.texts("l") == ("a",)
        assert fields.child("o").integer("k") == 1

    def test_null_and_absent_both_mean_the_default(self, fields):
        assert fields.integer("null", 7) == fields.integer("absent", 7) == 7
        assert fields.texts("null") is None
        assert fields.child("absent") is None
        assert not fields.has("null")

    def test_a_required_value_that_is_absent_is_an_error(self, fields):
        with pytest.raises(FormatError, match=r"c\.json\.absent: missing, expected a whole"):
            fields.integer("absent")

    @pytest.mark.parametrize(
        ("method", "key"),
        [
            ("integer", "f"),
            ("integer", "b"),
            ("number", "b"),
            ("number", "s"),
            ("flag", "n"),
            ("text", "n"),
            ("texts", "s"),
            ("child", "l"),
            ("token_ids", "s"),
        ],
    )
    def test_nothing_is_converted(self, fields, method, key):
        with pytest.raises(FormatError, match=rf"c\.json\.{key}: is .*, expected"):
            getattr(fields, method)(key)

    def test_a_number_below_its_minimum_is_an_error(self, fields):
        with pytest.raises(FormatError, match="is 4, expected a whole number of at least 5"):
            fields.integer("n", minimum=5)


def folder_with(tmp_path, config, **files):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, obj in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(obj))
    return Config.from_directory(tmp_path)


def test_common_settings_are_read(tmp_path):
    config = folder_with(tmp_path, llama_config())
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (130, 128, 2)
    assert config.max_position_embeddings == 256
    assert config.bos_token_id is None
    assert config.eos_token_ids == (1,)
    assert not config.tie_word_embeddings
    assert config.quantization is None


def test_settings_of_a_multimodal_model_come_from_text_config(tmp_path):
    text = qwen35_config(bos_token_id=5)
    config = folder_with(
        tmp_path, {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    )
    assert config.hidden_size == 128
    assert config.bos_token_id == 5


def test_generation_config_adds_end_tokens(tmp_path):
    config = folder_with(
        tmp_path, llama_config(eos_token_id=[1, 2]), generation_config={"eos_token_id": [3, 1]}
    )
    assert config.eos_token_ids == (1, 2, 3)


@pytest.mark.parametrize("value", ["absent", None])
def test_a_model_without_special_tokens_is_no_error(value):
    config = Config(llama_config(bos_token_id=value, eos_token_id=value, pad_token_id=value))
    assert config.bos_token_id is None
    assert config.pad_token_id is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("names", ["absent", [], ["A", "B"]])
def test_not_exactly_one_architecture_is_an_error(names):
    with pytest.raises(FormatError, match="expected exactly one"):
        Config(llama_config(architectures=names))


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_model_quantized_by_another_method_is_refused(where):
    section = {"quantization_config": {"quant_method": "fp8"}}
    config = llama_config(**section) if where == "top" else llama_config(text_config=section)
    with pytest.raises(UnsupportedError, match="quant_method is 'fp8'"):
        Config(config)


def test_a_compressed_model_is_refused():
    with pytest.raises(UnsupportedError, match="compression_config"):
        Config(llama_config(compression_config={"format": "x"}))


def tied(top, text):
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": qwen35_config()}
    for obj, value in ((config, top), (config["text_config"], text)):
        if value is not None:
            obj["tie_word_embeddings"] = value
    return Config(config)


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (None, None, False),
        (True, None, True),
        (None, True, True),
        (True, True, True),
        (False, False, False),
    ],
)
def test_tied_embeddings_are_read_at_both_levels(top, text, expected):
    assert tied(top, text).tie_word_embeddings is expected


def test_levels_that_contradict_each_other_about_tied_embeddings_are_an_error():
    with pytest.raises(FormatError, match="tie_word_embeddings: contradicts"):
        _ = tied(False, True).tie_word_embeddings


@pytest.mark.parametrize("text", ["{", "[]", b"\xff\xfe"])
def test_a_file_that_is_no_json_object_is_an_error(tmp_path, text):
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(FormatError, match=r"config\.json"):
        Config.from_directory(tmp_path)


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(FormatError, match=r"config\.json: missing"):
        Config.from_directory(tmp_path)


def test_a_configuration_in_memory_has_no_tensors():
    config = Config(llama_config())
    assert config.tensor_names() == frozenset()
    with pytest.raises(FormatError, match="made in memory"):
        _ = config.files
