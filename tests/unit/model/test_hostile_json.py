"""JSON files that are no JSON, beside a model: always a FormatError that names the file."""

from __future__ import annotations

import re
import struct

import pytest

from exllamav3.checkpoint.header import read_header
from exllamav3.checkpoint.index import read_index
from exllamav3.errors import FormatError
from exllamav3.model.fields import read_json_object
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
