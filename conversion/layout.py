"""The whole job as a layout: what every module becomes, at which rate, with which topology."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from exllamav3.checkpoint.header import DTYPE_BITS
from exllamav3.codec.bit_rate import BitRate
from exllamav3.errors import ConversionError
from exllamav3.topology import Plan, ResolvedTopology

from . import topology_step
from .allocation import summary_lines
from .options import UNQUANTIZED_BITS, ConversionOptions
from .source import Source
from .targets import ModuleLayout, achieved_bits, allocate_model, module_layout

CHECKPOINTS_ON_DISK = 3
"""The one in place, the one before, and the one being written."""


@dataclass(frozen=True, slots=True)
class JobLayout:
    """decoder and mtp: one entry per top-level module, in output order.

    rate: mean bits per weight, as they will be stored
    """

    decoder: tuple[ModuleLayout, ...]
    mtp: tuple[ModuleLayout, ...]
    topology: ResolvedTopology | None
    rate: BitRate

    @property
    def mean_bits(self) -> float:
        """Achieved over the decoder's linears, which share the budget; 0 without any."""
        return self.rate.decoder or 0.0

    @property
    def all(self) -> tuple[ModuleLayout, ...]:
        return self.decoder + self.mtp


def job_layout(source: Source, options: ConversionOptions, plan: Plan | None) -> JobLayout:
    """Allocate bits on the split tree, resolve the plan, and lay every module out.

    Raises:
        TopologyError: the plan does not fit the model, the allocation or the source tensors.
    """
    names = source.tensors.names()
    modules = source.decoder()
    bits = allocate_model(modules, options)
    topology = topology_step.resolve(plan, source, options, bits) if plan is not None else None
    decoder = tuple(module_layout(m, names, bits, options, topology) for m in modules)
    mtp = tuple(module_layout(m, names, {}, options, None, calibrated=False) for m in source.mtp())
    return JobLayout(decoder, mtp, topology, achieved_bits(decoder + mtp))


def describe(layout: JobLayout, source: Source, options: ConversionOptions) -> list[str]:
    """The job for people, before it starts."""
    tensors = source.account
    targets = [target for module in layout.decoder for target in module.targets]
    lines = [
        f"source      {source.directory}  ({source.config.architecture}, "
        f"{len(tensors.claimed) + len(tensors.copied)} tensors)",
        f"work        {options.work_dir}",
        f"output      {options.out_dir}",
        f"calibration {options.cal_rows} rows x {options.cal_cols} tokens, "
        f"{options.cal_data or 'bundled text'}",
        f"bits        per weight: {options.bits:g} asked, achieved {layout.rate}",
        f"settings    codebook {options.codebook}, output scales {options.out_scales}, seed "
        f"{options.seed}, on {', '.join(options.devices)}",
    ]
    lines += [f"  {line}" for line in summary_lines((t.key, t.bits) for t in targets)]
    if layout.mtp:
        rate = f"{options.mtp_bits} bits"
        lines.append(
            f"MTP head    {'as it is' if options.mtp_bits == UNQUANTIZED_BITS else rate}, "
            f"uncalibrated"
        )
    if tensors.copied:
        lines.append(f"copied      {len(tensors.copied)} tensors as they are in the source")
    lines += [f"dropped     {name}: {reason}" for name, reason in tensors.dropped]
    if layout.topology is not None:
        lines += [f"topology    {row.layer}: {row.variant}" for row in layout.topology.rows]
    return lines


def output_bytes(layout: JobLayout, source: Source) -> int:
    """Size of all output tensors, to within markers and biases."""
    stored = {
        name: prod(meta.shape) * DTYPE_BITS[meta.dtype] // 8
        for name, meta in source.tensors.inventory().items()
    }
    total = sum(stored[name] for name in source.account.copied)
    for module in layout.all:
        total += sum(target.size_bytes for target in module.targets)
        total += sum(stored[name] for name in module.kept)
        total += sum(2 * part.in_features * part.out_features for part in module.halved)
    return total


def check_space(layout: JobLayout, source: Source, options: ConversionOptions) -> None:
    """Compare what the job will write with what is free.

    The work folder takes the quantized modules and the calibration state, the output folder
    the result.

    Raises:
        ConversionError: one of the file systems is too small.
    """
    result_bytes = output_bytes(layout, source)
    row_bytes = options.cal_cols * source.config.hidden_size * 4
    state_bytes = CHECKPOINTS_ON_DISK * options.cal_rows * row_bytes
    needed: dict[int, int] = {}
    folders: dict[int, list[Path]] = {}
    for folder, size_bytes in (
        (Path(options.work_dir), result_bytes + state_bytes),
        (Path(options.out_dir), result_bytes),
    ):
        existing = _nearest_existing(folder)
        system = existing.stat().st_dev
        needed[system] = needed.get(system, 0) + size_bytes
        folders.setdefault(system, []).append(existing)
    for system, size_bytes in needed.items():
        free_bytes = shutil.disk_usage(folders[system][0]).free
        if size_bytes > free_bytes:
            raise ConversionError(
                f"{' and '.join(map(str, folders[system]))}: the job needs about "
                f"{_gigabytes(size_bytes)} here, {_gigabytes(free_bytes)} are free; make space, "
                f"choose other folders (-w, -o), or calibrate with fewer or shorter "
                f"rows (-cr, -cc)"
            )


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e7 else f"{size_bytes / 1e6:.2f} MB"
