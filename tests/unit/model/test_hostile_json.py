"""JSON files that are no JSON, beside a model: always a FormatError that names the file."""

from __future__ import annotations

import codecs
import json
import re
import struct

import pytest
from tiny_models import llama_config, random_tensors, write_folder

from exllamav3.checkpoint.header import read_header
from exllamav3.checkpoint.index import read_index
from exllamav3.errors import FormatError
from exllamav3.model.config import Config
from exllamav3.model.fields import read_json_object
from exllamav3.model.model import Model
from exllamav3.tokenizer.chat import read_chat_template
from exllamav3.tokenizer.special import read_json

HOSTILE = {
    "nothing": b"",
    "nested arrays": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000,
    "a number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "no UTF-8": b"\xff{}",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "null": b"null",
}


def header(path):
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    return read_header(path)


@pytest.mark.parametrize("read", [header, read_index, read_json_object, read_json])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_json_object_is_a_format_error_that_names_the_file(tmp_path, read, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FormatError, match=re.escape(str(tmp_path / "file"))):
        read(tmp_path / "file")


@pytest.mark.parametrize("dtype", ["[]", "{}", "null", "7", '"BF17"'])
def test_a_dtype_that_is_no_known_name_is_a_format_error(tmp_path, dtype):
    entry = f'{{"a":{{"dtype":{dtype},"shape":[0],"data_offsets":[0,0]}}}}'
    (tmp_path / "file").write_text(entry)
    with pytest.raises(FormatError, match=r"tensor a: dtype .* is unknown"):
        header(tmp_path / "file")


def test_a_chat_template_that_is_no_text_is_a_format_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"chat_template\.jinja: not UTF-8"):
        read_chat_template(tmp_path, {})


def test_a_byte_order_mark_is_named(tmp_path):
    text = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
    (tmp_path / "config.json").write_bytes(codecs.BOM_UTF8 + text)
    with pytest.raises(FormatError, match=r"config\.json: not JSON \(it begins with a byte order"):
        Config.from_directory(tmp_path)


def test_a_folder_that_is_none_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="file: is a file, expected a model folder"):
        Config.from_directory(tmp_path / "file")
    with pytest.raises(FormatError, match="none: there is no such folder, expected a model folder"):
        Config.from_directory(tmp_path / "none")


def test_more_layers_than_tensors_are_refused_before_any_is_built(tmp_path):
    folder = write_folder(tmp_path, llama_config(), random_tensors(llama_config()))
    config = llama_config(num_hidden_layers=10**9)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"num_hidden_layers: is 1000000000, but 21 tensors are"):
        Model.from_config(Config.from_directory(folder))
