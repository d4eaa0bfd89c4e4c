"""The configuration of a model folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from exllamav3.checkpoint.quantization_config import (
    QuantizationConfig,
    parse_quantization_config,
)
from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.fields import Fields, read_json_object


class Config:
    """What `config.json` says, with what every architecture has in common read out.

    Attributes:
        directory: the model folder, None for a configuration made in memory.
        top: the whole of config.json.
        text: the settings of the text decoder: `text_config` where there is one, else `top`.
        architecture: the one entry of `architectures`.
        quantization: parsed `quantization_config`, None for an unquantized model.
    """

    def __init__(self, obj: dict[str, Any], directory: Path | None = None) -> None:
        where = str(directory / "config.json") if directory else "config.json"
        self.directory = directory
        self.top = Fields(obj, where)
        self.text = self.top.child("text_config") or self.top
        names = self.top.texts("architectures") or ()
        if len(names) != 1:
            raise FormatError(
                f"{where}.architectures: lists {len(names)} names {list(names)}, expected exactly "
                f"one, such as LlamaForCausalLM"
            )
        self.architecture = names[0]
        self.quantization = self._read_quantization()

    @classmethod
    def from_directory(cls, directory: str | Path) -> Config:
        """Read the configuration of a model folder.

        Raises:
            FormatError: config.json is missing or malformed.
            UnsupportedError: the model is quantized by another method.
        """
        directory = Path(directory)
        if not directory.is_dir():
            problem = "is a file" if directory.exists() else "there is no such folder"
            raise FormatError(f"{directory}: {problem}, expected a model folder with a config.json")
        return cls(read_json_object(directory / "config.json"), directory)

    def _read_quantization(self) -> QuantizationConfig | None:
        for fields in (self.top, self.text):
            if fields.has("compression_config"):
                raise UnsupportedError(
                    f"{fields.where}.compression_config: the model is compressed by another "
                    f"method; start from the BF16 model it was made from"
                )
            section = fields.child("quantization_config")
            if section is not None:
                return parse_quantization_config(section.obj, section.where)
        return None

    @cached_property
    def files(self) -> TensorFiles:
        """The tensors of the folder; headers are read at the first use.

        Raises:
            FormatError: the files contradict each other, see `TensorFiles`.
        """
        if self.directory is None:
            raise FormatError("this configuration was made in memory, it has no tensor files")
        return TensorFiles(self.directory)

    def tensor_names(self) -> frozenset[str]:
        """Names of all tensors; empty for a configuration made in memory."""
        return frozenset(self.files.names()) if self.directory else frozenset()

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, which is also the width of the logits."""
        return self.text.integer("vocab_size")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.text.integer("hidden_size")

    @property
    def num_hidden_layers(self) -> int:
        """Number of decoder blocks."""
        return self.text.integer("num_hidden_layers")

    @property
    def max_position_embeddings(self) -> int:
        """Longest context the model was made for, in tokens."""
        return self.text.integer("max_position_embeddings")

    def _first_token(self, key: str) -> int | None:
        for fields in (self.text, self.top):
            if ids := fields.token_ids(key):
                return ids[0]
        return None

    @property
    def bos_token_id(self) -> int | None:
        """Token that begins a sequence, None where the model has none."""
        return self._first_token("bos_token_id")

    @property
    def pad_token_id(self) -> int | None:
        """Token for padding, None where the model has none."""
        return self._first_token("pad_token_id")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: of config.json, then those generation_config.json adds."""
        ids = self.text.token_ids("eos_token_id") or self.top.token_ids("eos_token_id")
        path = self.directory / "generation_config.json" if self.directory else None
        if path is not None and path.is_file():
            ids += Fields(read_json_object(path), str(path)).token_ids("eos_token_id")
        return tuple(dict.fromkeys(ids))

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the head is the embedding table.

        Raises:
            FormatError: config.json and its text_config state opposite values, and the model is
                not EXL3 (whose head is always a tensor of its own).
        """
        stated = {
            f.flag("tie_word_embeddings")
            for f in (self.top, self.text)
            if f.has("tie_word_embeddings")
        }
        if len(stated) == 2 and self.quantization is None:
            raise FormatError(
                f"{self.text.where}.tie_word_embeddings: contradicts the value at the top level of "
                f"config.json; set both to the same"
            )
        return self.text.flag("tie_word_embeddings", self.top.flag("tie_word_embeddings", False))
