import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from exllamav3.errors import FormatError
from exllamav3.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "naïve café — “quotes”",
    "日本語のテキスト",
    "emoji 👩‍👩‍👧 🇩🇪 end",
    "\ttabs\n\n  spaces ",
]


def write_byte_level_tokenizer(directory, tokenizer_config=None, config=None, merges=()):
    """A tokenizer of single bytes, so that every character beyond ASCII spans several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|end|>": 0, "<|start|>": 1}
    for symbol in [*alphabet, *("".join(pair) for pair in merges)]:
        vocab[symbol] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.enable_padding(length=64)
    backend.enable_truncation(8)
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    for name, content in (("tokenizer_config", tokenizer_config), ("config", config)):
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_an_encoded_text_gives_the_text_back(tmp_path, text):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    ids = tokenizer.encode(text)
    assert ids.shape == (1, len(text.encode()))  # stored padding and truncation are off
    assert ids.dtype == torch.int64
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_text_and_never_split_a_character(tmp_path, text):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode_ids(text)] + [stream.flush()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_that_ends_inside_a_character_shows_it_only_at_the_flush(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    stream = tokenizer.stream()
    ids = tokenizer.encode_ids("a€")
    assert [stream.push(i) for i in ids[:-1]] == ["a", "", ""]
    assert stream.flush() == tokenizer.decode(ids[:-1])[1:] == "\ufffd"


def test_random_bytes_stream_to_the_same_text_as_decoding_them_at_once(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    ids = torch.randint(2, 258, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    stream = tokenizer.stream()
    assert "".join([stream.push(i) for i in ids] + [stream.flush()]) == tokenizer.decode(ids)


def test_a_stream_after_a_prompt_gives_only_the_new_text(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    ids = tokenizer.encode_ids("prompt→and more")
    stream = tokenizer.stream(context_ids=ids[:6])
    assert "".join([stream.push(i) for i in ids[6:]] + [stream.flush()]) == "→and more"


def test_sentencepiece_streams_keep_the_spaces_between_words(tmp_path):
    vocab = {"<unk>": 0, "▁Hello": 1, "▁world": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "!": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = [1, 2, 3, 4, 5, 2, 6]
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert pieces == ["Hello", " world", "", "", "€", " world", "!"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_null_bos_in_the_tokenizer_configuration_wins_over_a_number_in_the_model_s(tmp_path):
    tokenizer = write_byte_level_tokenizer(
        tmp_path,
        {"bos_token": None, "eos_token": "<|end|>"},
        {"bos_token_id": 0, "eos_token_id": [0, 1], "pad_token_id": None},
    )
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode_ids("a", add_bos=True) == tokenizer.encode_ids("a")
    assert tokenizer.eos_token_id == 0
    assert tokenizer.eos_token_ids == (0, 1)
    assert tokenizer.pad_token_id is None


def test_bos_is_added_once(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path, {"bos_token": {"content": "<|start|>"}})
    ids = tokenizer.encode_ids("a", add_bos=True)
    assert ids == [1, *tokenizer.encode_ids("a")]
    again = tokenizer.encode_ids("<|start|>a", add_bos=True, encode_special_tokens=True)
    assert again == ids


def test_special_tokens_in_a_text_are_plain_text_unless_asked_for(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    assert tokenizer.encode_ids("<|end|>", encode_special_tokens=True) == [0]
    plain = tokenizer.encode_ids("<|end|>")
    assert len(plain) == 7
    assert tokenizer.decode(plain) == "<|end|>"
    assert tokenizer.decode([0]) == ""
    assert tokenizer.decode([0], decode_special_tokens=True) == "<|end|>"


def test_ids_beyond_the_vocabulary_have_no_text(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    assert tokenizer.decode([*tokenizer.encode_ids("ab"), 5000]) == "ab"


def test_text_settings_of_a_nested_configuration_are_found(tmp_path):
    config = {"text_config": {"eos_token_id": 1, "bos_token_id": 0}, "bos_token_id": None}
    tokenizer = write_byte_level_tokenizer(tmp_path, config=config)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (1,)


def test_added_tokens_named_only_by_the_configuration_are_added(tmp_path):
    declared = {"258": {"content": "<|tool|>", "special": True}}
    tokenizer = write_byte_level_tokenizer(tmp_path, {"added_tokens_decoder": declared})
    assert tokenizer.encode_ids("<|tool|>", encode_special_tokens=True) == [258]
    assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
    ("tokenizer_config", "message"),
    [
        ({"eos_token": "<|other|>"}, "eos_token '<|other|>' is not in the vocabulary"),
        ({"eos_token": 7}, "eos_token is 7, expected a string or null"),
        ({"added_tokens_decoder": {"300": {"content": "<|x|>"}}}, "the id 300, tokenizer.json"),
        ({"chat_template": [{"name": "tool_use", "template": ""}]}, 'one named "default"'),
    ],
)
def test_contradicting_files_are_refused(tmp_path, tokenizer_config, message):
    with pytest.raises(FormatError) as caught:
        write_byte_level_tokenizer(tmp_path, tokenizer_config)
    assert message in str(caught.value)


def test_a_missing_or_damaged_tokenizer_file_is_named(tmp_path):
    with pytest.raises(FormatError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match="not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_decoding_a_batch_at_once_is_refused(tmp_path):
    tokenizer = write_byte_level_tokenizer(tmp_path)
    with pytest.raises(FormatError, match="one by one"):
        tokenizer.decode(torch.zeros(2, 3, dtype=torch.long))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'forbidden' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_template_lays_out_a_conversation(tmp_path):
    tokenizer = write_byte_level_tokenizer(
        tmp_path, {"bos_token": "<|start|>", "chat_template": TEMPLATE}
    )
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.format_chat(messages) == "<|start|>[user] hi\n[assistant]"
    assert tokenizer.format_chat(messages, add_generation_prompt=False).endswith("hi\n")


def test_a_template_file_wins_and_gets_variables(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}{{ extra }}")
    tokenizer = write_byte_level_tokenizer(tmp_path, {"chat_template": TEMPLATE})
    text = tokenizer.format_chat([{"role": "user", "content": "<é>"}], variables={"extra": 1})
    assert text == '"<é>"1'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE, "no such role"),
        ("{% for %}", "chat template"),
        ("{{ messages.__class__.__mro__ }}", "chat template"),
        ("{{ missing.attribute }}", "chat template"),
    ],
)
def test_a_template_that_fails_says_why(tmp_path, template, message):
    tokenizer = write_byte_level_tokenizer(tmp_path, {"chat_template": template})
    with pytest.raises(FormatError, match=message):
        tokenizer.format_chat([{"role": "forbidden", "content": ""}])


def test_a_model_without_a_chat_template_says_so(tmp_path):
    with pytest.raises(FormatError, match="no chat template"):
        write_byte_level_tokenizer(tmp_path).format_chat([])
