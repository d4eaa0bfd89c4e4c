"""From finished modules to a checkpoint folder, in an order that never shows half a model.

shards, index, side files    each under a temporary name, then renamed
verification                 the folder is opened again and compared with the job
quantization_config.json
config.json                  makes the folder a model
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from exllamav3.checkpoint.header import read_header
from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.codec.params import Codebook, bits_of_trellis
from exllamav3.errors import ConversionError
from exllamav3.model.config import Config
from exllamav3.model.model import Model
from exllamav3.topology import ResolvedTopology

from . import topology_step
from .durable import copy_file, write_json
from .job_folder import JobFolder
from .layout import JobLayout
from .metadata import output_config, quantization_config, tensor_storage
from .options import ConversionOptions
from .output_folder import OutputFolder, side_files
from .reports import LinearReport, Listener, ModuleReport
from .shards import MEBIBYTE, OutputGroup, write_shards
from .source import Source
from .tensor_file import PendingTensor


def write_output(
    folder: JobFolder,
    output: OutputFolder,
    source: Source,
    layout: JobLayout,
    options: ConversionOptions,
    listener: Listener,
) -> None:
    """Write the whole output folder, which `output` has claimed.

    Raises:
        ConversionError: the disk is full, or what was written is not what was meant; there is
            no config.json then, and resuming writes the folder again.
        TopologyError: the written payloads do not match the declaration.
    """
    copied, ignored = side_files(source.directory)
    output.clear(copied)
    topology = layout.topology
    groups = _groups(folder, source, layout)
    header = topology_step.shard_header(topology) if topology is not None else None
    index_extra = topology_step.index_metadata(topology) if topology is not None else {}
    names = write_shards(
        output.path, groups, options.shard_size * MEBIBYTE, header, index_extra, folder.step
    )
    listener.message(f"wrote {', '.join(names)}")
    folder.step("shards in place")
    for name in copied:
        copy_file(source.directory / name, output.path / name)
    if ignored:
        listener.message(f"not copied (weights in another form): {', '.join(ignored)}")
    folder.step("side file")

    has_mtp = any(module.targets for module in layout.mtp)
    section = quantization_config(options, layout.mean_bits, has_mtp, topology)
    written = TensorFiles(output.path)
    storage = tensor_storage(source.decoder(topology), written.inventory(), topology)
    _verify(written, groups, source, layout)
    for module in layout.all:
        for linear in ModuleReport.from_json(folder.module_report(module.key)).linears:
            _check_linear(written, linear)
    if topology is not None:
        topology_step.verify(topology, source, written, section.to_obj(), storage)
    write_json(
        output.path / "quantization_config.json", {**section.to_obj(), "tensor_storage": storage}
    )
    config = output_config(source.config_obj(), section)
    _check_constructible(config, output, topology)
    folder.step("before config.json")
    write_json(output.path / "config.json", config)


def _groups(folder: JobFolder, source: Source, layout: JobLayout) -> list[OutputGroup]:
    """Output tensors in order: decoder, MTP head, then what is copied from the source."""
    groups = []
    for module in layout.all:
        header = read_header(folder.module_file(module.key))
        tensors = tuple(
            PendingTensor(
                name, meta.dtype, meta.shape, partial(_read, folder.module_file(module.key), name)
            )
            for name, meta in header.tensors.items()
        )
        groups.append(OutputGroup(module.key, tensors))
    copied: dict[str, list[PendingTensor]] = {}
    for name in source.account.copied:
        meta = source.tensors.describe(name)
        pending = PendingTensor(name, meta.dtype, meta.shape, partial(source.tensors.get, name))
        copied.setdefault(_module_of(name), []).append(pending)
    groups += [OutputGroup(key, tuple(tensors)) for key, tensors in copied.items()]
    return groups


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _module_of(name: str) -> str:
    """The part of a copied tensor's name that keeps a block together: up to its number."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:2])


def _verify(
    written: TensorFiles, groups: Sequence[OutputGroup], source: Source, layout: JobLayout
) -> None:
    """Compare the folder as it can be read now with what was meant to be in it."""
    meant = {t.name: (t.shape, t.dtype) for group in groups for t in group.tensors}
    found = {name: (tuple(m.shape), m.dtype) for name, m in written.inventory().items()}
    for name in sorted(meant.keys() | found.keys()):
        if meant.get(name) != found.get(name):
            raise ConversionError(
                f"{written.directory}: tensor {name} is {found.get(name, 'missing')}, expected "
                f"{meant.get(name, 'none of that name')}; the folder changed while it was "
                f"written. Resume the job to write it again"
            )
    needed = set(source.account.copied).union(*(module.needed for module in layout.all))
    lost = needed - found.keys()
    if lost:
        raise ConversionError(
            f"{written.directory}: {len(lost)} tensors are missing in the output: "
            f"{', '.join(sorted(lost)[:6])}; start a new job in an empty folder"
        )


def _check_linear(written: TensorFiles, linear: LinearReport) -> None:
    """Rate and codebook, derived from the stored tensors, are those the linear was made with."""
    bits = bits_of_trellis(written.describe(f"{linear.key}.trellis").shape[-1], linear.key)
    markers = {
        candidate.value: int(written.get(f"{linear.key}.{candidate.marker}")) & 0xFFFFFFFF
        for candidate in Codebook
        if candidate.marker is not None and written.has(f"{linear.key}.{candidate.marker}")
    }
    codebook = Codebook.from_name(linear.codebook)
    expected = {codebook.value: codebook.multiplier} if codebook.marker is not None else {}
    if bits != linear.bits or markers != expected:
        raise ConversionError(
            f"{written.directory}: {linear.key} is stored with {bits} bits and markers {markers}, "
            f"expected {linear.bits} bits and {expected}; the folder changed while it was written. "
            f"Resume the job to write it again"
        )


def _check_constructible(
    config: dict[str, Any], output: OutputFolder, topology: ResolvedTopology | None
) -> None:
    """Build the model that config.json will describe; no weight is read."""
    Model.from_config(Config(config, output.path), topology)
