"""`Tokenizer`: encoding, decoding, special ids and the chat template of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.tokenizer.chat import Message, read_chat_template, render_chat_template
from exllamav3.tokenizer.special import SpecialTokens, read_json, read_special_tokens
from exllamav3.tokenizer.stream import TokenStream


class HasDirectory(Protocol):
    """The one thing a tokenizer needs of a model configuration."""

    @property
    def directory(self) -> Path | None: ...


class Tokenizer:
    """Maps text to token ids and back.

    Build one with `from_config` or `from_directory`.

    Attributes:
        bos_token_id, eos_token_id, pad_token_id: ids, or None where the model has no such token.
        eos_token_ids: all ids that end a generation.
        vocab_size: number of ids, added tokens included. A model's logits may be wider.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens, chat_template: str | None
    ) -> None:
        # Padding and truncation may be stored in tokenizer.json; both would alter texts silently.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.bos_token_id = special.bos_id
        self.eos_token_id = special.eos_id
        self.eos_token_ids = special.stop_ids
        self.pad_token_id = special.pad_id
        self.unk_token_id = special.unk_id
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_config(cls, config: HasDirectory) -> Tokenizer:
        """Load the tokenizer beside a model.

        Raises:
            FormatError: as `from_directory`, or the configuration was made in memory.
        """
        if config.directory is None:
            raise FormatError("this configuration was made in memory: it has no tokenizer files")
        return cls.from_directory(config.directory)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """Load `tokenizer.json` and the configuration files beside it.

        Raises:
            FormatError: the file is missing or damaged, or the files contradict each other.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise FormatError(
                f"{directory}: no tokenizer.json; copy it from the original model, or convert its "
                f"tokenizer with `transformers` (save_pretrained of a fast tokenizer)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise FormatError(f"{path}: not a tokenizer ({error}); restore the file") from error
        tokenizer_config = read_json(directory / "tokenizer_config.json")
        _add_declared_tokens(backend, tokenizer_config, directory / "tokenizer_config.json")
        special = read_special_tokens(directory, tokenizer_config, backend.token_to_id)
        return cls(backend, special, read_chat_template(directory, tokenizer_config))

    def encode(
        self, text: str, add_bos: bool = False, encode_special_tokens: bool = False
    ) -> Tensor:
        """Encode a text.

        Args:
            text: any string.
            add_bos: put the BOS id first. A model without BOS (`bos_token_id is None`) gets none,
                and a text that already begins with it gets no second one.
            encode_special_tokens: whether the spelling of a special token ("<|im_end|>") becomes
                its id. Off by default, so that text from outside cannot forge a turn.

        Returns:
            int64 `(1, tokens)`, on the CPU.
        """
        return torch.tensor([self.encode_ids(text, add_bos, encode_special_tokens)]).long()

    def encode_ids(
        self, text: str, add_bos: bool = False, encode_special_tokens: bool = False
    ) -> list[int]:
        """As `encode`, but returns a plain list. FormatError: the text has no UTF-8 form."""
        if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
            found = "bytes that are not UTF-8" if isinstance(text, str) else type(text).__name__
            raise FormatError(f"the text to encode is or has {found}, expected a str of Unicode")
        # The library's property has the opposite sense: true means "as ordinary text".
        self._backend.encode_special_tokens = not encode_special_tokens
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Tensor | Sequence[int], decode_special_tokens: bool = False) -> str:
        """Decode one sequence of ids.

        Args:
            ids: ids, as a list or an integer tensor `(tokens,)` or `(1, tokens)`. Ids beyond the
                vocabulary (padding of the model's output layer) have no text.
            decode_special_tokens: whether special tokens are spelled out or dropped.

        Raises:
            FormatError: the tensor holds more than one sequence.
        """
        return self._backend.decode(
            _id_list(ids, self.vocab_size), skip_special_tokens=not decode_special_tokens
        )

    def stream(
        self, context_ids: Sequence[int] = (), decode_special_tokens: bool = False
    ) -> TokenStream:
        """Start an incremental decoding; `context_ids` are the tokens just before it."""
        return TokenStream(
            lambda ids: self.decode(ids, decode_special_tokens=decode_special_tokens), context_ids
        )

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Spelling of a token in the vocabulary, or None for an id beyond it."""
        return self._backend.id_to_token(token_id)

    def format_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Lay out a conversation by the model's chat template.

        Encode the result with `encode_special_tokens=True` and without `add_bos`: a template
        writes the BOS token itself.

        Raises:
            FormatError: the model has no template, or the template refuses the conversation.
        """
        if self.chat_template is None:
            raise FormatError(
                "this model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); pass a plain prompt instead"
            )
        names = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id}
        spelled = {k: "" if v is None else self.id_to_token(v) or "" for k, v in names.items()}
        return render_chat_template(
            self.chat_template, messages, add_generation_prompt, {**spelled, **(variables or {})}
        )


def _id_list(ids: Tensor | Sequence[int], vocab_size: int) -> list[int]:
    if isinstance(ids, Tensor):
        if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
            raise FormatError(
                f"decode: ids have shape {tuple(ids.shape)}, expected (tokens,) or (1, tokens); "
                f"decode the rows of a batch one by one"
            )
        ids = ids.flatten().tolist()
    return [token_id for token_id in ids if 0 <= token_id < vocab_size]


def _add_declared_tokens(
    backend: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any], where: Path
) -> None:
    """Add tokens that only `added_tokens_decoder` of the tokenizer configuration names."""
    declared = tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise FormatError(f"{where}: added_tokens_decoder must be a JSON object of id: token")
    for key in sorted(declared, key=_token_number):
        entry = declared[key]
        content = entry.get("content") if isinstance(entry, dict) else entry
        if not isinstance(content, str):
            raise FormatError(f"{where}: added_tokens_decoder[{key!r}] has no text content")
        if backend.token_to_id(content) is None:
            options = entry if isinstance(entry, dict) else {}
            token = tokenizers.AddedToken(
                content,
                single_word=bool(options.get("single_word", False)),
                lstrip=bool(options.get("lstrip", False)),
                rstrip=bool(options.get("rstrip", False)),
                normalized=bool(options.get("normalized", False)),
            )
            if options.get("special", False):
                backend.add_special_tokens([token])
            else:
                backend.add_tokens([token])
        found = backend.token_to_id(content)
        if found != _token_number(key):
            raise FormatError(
                f"{where}: added_tokens_decoder gives {content!r} the id {key}, tokenizer.json "
                f"gives it {found}; the two files belong to different models"
            )


def _token_number(key: str) -> int:
    if not key.isdecimal():
        raise FormatError(f"tokenizer_config.json: added_tokens_decoder key {key!r} is not an id")
    return int(key)
