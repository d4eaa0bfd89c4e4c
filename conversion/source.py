"""The checkpoint to convert: its model, its tensors, and whether it can be converted at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from exllamav3.architecture.decoder import DecoderSpec, build_decoder, build_mtp, model_facts
from exllamav3.architecture.table import read_spec
from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError, FormatError
from exllamav3.model.config import Config
from exllamav3.model.leftovers import SIDE_PREFIXES
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import DTYPE_NAMES, WEIGHT_DTYPES, Module
from exllamav3.topology import ModelFacts, ResolvedTopology, TensorMeta

from .inventory import SourceAccount, account_for

QUANTIZED_SUFFIXES = (
    ".trellis",
    ".weight_scale_inv",
    ".weight_scale",
    ".qweight",
    ".weight_packed",
)
"""Tensors that only quantized checkpoints have."""
SAMPLE_BYTES = 256
"""Of each tensor, for the fingerprint: at its start, its middle and its end."""


class Source:
    """An unquantized checkpoint folder.

    Raises:
        ConversionError: not a folder, quantized already, incomplete, or with unknown tensors.
        FormatError, UnsupportedError: config.json or the tensor files are not readable here.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ConversionError(f"{directory}: the source (-i) is not a folder")
        self.directory = directory
        self.config = Config.from_directory(directory)
        if self.config.quantization is not None:
            raise ConversionError(
                f"{directory}: the source is already quantized (config.json has a "
                f"quantization_config of method exl3); convert the BF16 model it was made from"
            )
        self.spec: DecoderSpec = read_spec(self.config)
        self.tensors: TensorFiles = self.config.files
        self._check_dtypes()
        modules = [*self.decoder(), *self.mtp()]
        self.account: SourceAccount = account_for(
            self.tensors.names(), modules, (*self.spec.copied, *SIDE_PREFIXES), str(directory)
        )
        self._check_shapes(modules)

    def decoder(self, topology: ResolvedTopology | None = None) -> Sequence[Module]:
        """Fresh top-level modules of the text decoder, fused where a topology says so."""
        fused = [row.layer for row in topology.rows if row.is_fused] if topology else []
        return build_decoder(self.spec, fused)

    def mtp(self) -> Sequence[Module]:
        """Fresh modules of the multi-token-prediction head, if there is one."""
        return build_mtp(self.spec)

    def facts(self) -> ModelFacts:
        """What a topology plan may name."""
        return model_facts(self.spec)

    def fingerprint(self) -> str:
        """Changes with the configuration, any tensor's name, shape or dtype, or its values.

        Of the values a sample of each tensor counts, because hashing all of them would take
        minutes on a large model: another training or merge of the same model is told apart, a
        single changed number may not be.
        """
        digest = hashlib.sha256((self.directory / "config.json").read_bytes())
        described = [
            (name, meta.dtype, list(meta.shape))
            for name, meta in sorted(self.tensors.inventory().items())
        ]
        digest.update(json.dumps(described).encode())
        with ExitStack() as stack:
            shards = {
                name: stack.enter_context((self.directory / name).open("rb"))
                for name in self.tensors.headers
            }
            for name, _, _ in described:
                shard = self.tensors.file_of(name)
                start, stop = self.tensors.headers[shard].ranges[name]
                for at in (start, (start + stop) // 2, stop - SAMPLE_BYTES):
                    shards[shard].seek(max(at, start))
                    digest.update(shards[shard].read(min(SAMPLE_BYTES, stop - max(at, start))))
        return digest.hexdigest()

    def config_obj(self) -> dict[str, object]:
        """config.json as it is in the source."""
        obj = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        assert isinstance(obj, dict)
        return obj

    def _check_dtypes(self) -> None:
        for name, meta in self.tensors.inventory().items():
            if name.endswith(QUANTIZED_SUFFIXES) or meta.dtype.startswith(("F8_", "F4", "F6_")):
                raise ConversionError(
                    f"{self.directory}: tensor {name} ({meta.dtype} {list(meta.shape)}) shows that "
                    f"the source is already quantized; convert the BF16 model it was made from"
                )

    def _check_shapes(self, modules: Sequence[Module]) -> None:
        """Compare what the modules need with the headers, so that no job fails hours later."""
        headers = _HeadersOnly(self.tensors)
        for module in modules:
            for part in module:
                for name in part.own_names(self.tensors.names()):
                    meta = self.tensors.describe(name)
                    if meta.dtype not in WEIGHT_DTYPES:
                        raise FormatError(
                            f"{self.directory}: tensor {name} is stored as {meta.dtype}, expected "
                            f"one of {', '.join(WEIGHT_DTYPES)}; convert the source to BF16 first"
                        )
                if isinstance(part, Linear):
                    self._check_linear(part)
                    if part.alt_key is not None:
                        part.check_tied(self.tensors)
                else:
                    part.device = torch.device("meta")
                    part.load_own(headers)
                    part.unload_own()

    def _check_linear(self, part: Linear) -> None:
        shape = (part.out_features, part.in_features)
        name, *bias = part.own_names(self.tensors.names())
        found = tuple(self.tensors.describe(name).shape)
        if found != shape:
            raise FormatError(
                f"{self.directory}: tensor {name} has shape {list(found)}, config.json asks for "
                f"{list(shape)}; configuration and weights belong to different models"
            )
        for extra in bias:
            if tuple(self.tensors.describe(extra).shape) != shape[:1]:
                raise FormatError(
                    f"{self.directory}: tensor {extra} has shape "
                    f"{list(self.tensors.describe(extra).shape)}, expected {list(shape[:1])}"
                )


class _HeadersOnly:
    """A `TensorSource` without data: loading from it checks names, shapes and dtypes."""

    def __init__(self, tensors: TensorFiles) -> None:
        self.names, self.has, self.describe = tensors.names, tensors.has, tensors.describe

    def get(self, name: str) -> Tensor:
        meta: TensorMeta = self.describe(name)
        dtype = next(dtype for dtype, stored in DTYPE_NAMES.items() if stored == meta.dtype)
        return torch.empty(meta.shape, dtype=dtype, device="meta")
