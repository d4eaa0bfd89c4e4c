"""What the output says about itself: config.json and quantization_config.json."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from exllamav3 import __version__
from exllamav3.checkpoint.quantization_config import Calibration, QuantizationConfig
from exllamav3.checkpoint.tensor_storage import ModuleStorage
from exllamav3.codec.params import Codebook
from exllamav3.modules.module import Module
from exllamav3.topology import ResolvedTopology, TensorMeta, storage_annotation

from .options import UNQUANTIZED_BITS, ConversionOptions


def quantization_config(
    options: ConversionOptions,
    mean_bits: float,
    has_mtp: bool,
    topology: ResolvedTopology | None,
) -> QuantizationConfig:
    """The section that records how the checkpoint was made.

    Args:
        mean_bits: achieved over the budgeted linears.
        has_mtp: whether there are MTP linears, quantized at `options.mtp_bits`.
    """
    quantized_mtp = has_mtp and options.mtp_bits != UNQUANTIZED_BITS
    return QuantizationConfig(
        version=__version__,
        bits=round(mean_bits, 2),
        head_bits=options.head_bits,
        calibration=Calibration(options.cal_rows, options.cal_cols),
        out_scales=options.out_scales,
        codebook=Codebook.from_name(options.codebook),
        mtp_bits=options.mtp_bits if quantized_mtp else None,
        qkv_topology=topology.to_obj() if topology is not None else None,
    )


def output_config(source_config: Mapping[str, Any], section: QuantizationConfig) -> dict[str, Any]:
    """config.json of the result: the source's, the section, and a head of its own.

    The head is always written as `lm_head.*`, so wherever the source says that embedding and
    head are tied, the result says they are not.
    """
    config = copy.deepcopy(dict(source_config))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False
    config["quantization_config"] = section.to_obj()
    return config


def tensor_storage(
    modules: Sequence[Module],
    inventory: Mapping[str, TensorMeta],
    topology: ResolvedTopology | None,
) -> dict[str, Any]:
    """Inventory of the text model's leaf modules, from the headers that were written.

    Args:
        modules: top-level modules of the model as it will be loaded, fused where fused.
        inventory: every tensor of the output.
    """
    by_key: dict[str, dict[str, TensorMeta]] = {}
    for name, meta in inventory.items():
        by_key.setdefault(name.rpartition(".")[0], {})[name] = meta
    storage: dict[str, Any] = {}
    for top in modules:
        for leaf in top:
            if leaf.modules or leaf.key not in by_key:
                continue
            entry = ModuleStorage.from_tensors(leaf.key, by_key[leaf.key]).to_obj()
            if topology is not None:
                entry.update(storage_annotation(topology, leaf.key))
            storage[leaf.key] = entry
    return storage
