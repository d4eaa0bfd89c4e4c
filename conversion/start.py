"""Starting a job, new or resumed: every check that needs no weights, then the stored record."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exllamav3.errors import ConversionError
from exllamav3.ops.status import require_device
from exllamav3.tokenizer.tokenizer import Tokenizer
from exllamav3.topology import Plan

from . import topology_step
from .calibration import calibration_rows
from .durable import Step
from .job_folder import RECORD_FORMAT, JobFolder
from .layout import JobLayout, check_space, job_layout
from .options import ConversionOptions, resume_options
from .output_folder import OutputFolder
from .recovery import discard_damaged
from .source import Source


@dataclass(frozen=True, slots=True)
class StartedJob:
    """A stored job whose work folder is locked by this process.

    notes: what the user should know about changed options
    """

    folder: JobFolder
    output: OutputFolder
    options: ConversionOptions
    source: Source
    layout: JobLayout
    notes: tuple[str, ...] = ()


def start_new(options: ConversionOptions, plan_path: str | None, step: Step) -> StartedJob:
    """Create a job; see `ConversionJob.create`."""
    options = replace(options, **_absolute(options.to_json()))
    _check_paths(options)
    check_devices(options.devices)
    source = Source(Path(options.in_dir))
    plan = topology_step.new_plan(plan_path, source, options) if plan_path is not None else None
    layout = job_layout(source, options, plan)
    folder = JobFolder(Path(options.work_dir), step)
    try:
        folder.check_empty()
        output = OutputFolder(Path(options.out_dir), uuid.uuid4().hex)
        output.check_free()
        check_space(layout, source, options)
        rows = calibration_rows(
            lambda: Tokenizer.from_directory(options.in_dir),
            source.config.vocab_size,
            options.cal_rows,
            options.cal_cols,
            options.cal_data,
        )
        folder.create(_record(output.job_id, options, plan, source), rows)
        output.claim()
    except BaseException:
        folder.discard()
        raise
    return StartedJob(folder, output, options, source, layout)


def start_resumed(
    work_dir: str, given: Mapping[str, Any], plan_path: str | None, step: Step
) -> StartedJob:
    """Take up a job; see `ConversionJob.resume`."""
    if not work_dir or not Path(work_dir).is_dir():
        raise ConversionError(f"{work_dir}: no such folder (-w), so no job to resume")
    folder = JobFolder(Path(work_dir), step)
    try:
        stated = {**given, "work_dir": work_dir}
        return _resume(folder, {**stated, **_absolute(stated)}, plan_path)
    except BaseException:
        folder.close()
        raise


def _resume(folder: JobFolder, given: Mapping[str, Any], plan_path: str | None) -> StartedJob:
    record = folder.read_record()
    where = str(folder.path / "job.json")
    stored = ConversionOptions.from_json(record["options"], where)
    options, changed = resume_options(stored, given, where)
    _check_paths(options)
    check_devices(options.devices)
    plan = _stored_plan(record["qkv_topology"], plan_path, changed, where)
    source = Source(Path(options.in_dir))
    if source.fingerprint() != record["source"]:
        raise ConversionError(
            f"{options.in_dir}: not the source this job was started with (configuration or "
            f"tensors differ); restore it, or start a new job"
        )
    layout = job_layout(source, options, plan)
    notes: tuple[str, ...] = ()
    output = OutputFolder(Path(options.out_dir), record["id"])
    if not is_finished(folder, options):
        output.claim()
        notes = discard_damaged(folder, layout)
    notes += _notes(folder, layout, options, changed)
    if changed:
        folder.write_record(_record(output.job_id, options, plan, source))
    return StartedJob(folder, output, options, source, layout, notes)


def is_finished(folder: JobFolder, options: ConversionOptions) -> bool:
    """Whether an earlier run wrote the output folder completely."""
    out_dir = Path(options.out_dir)
    done = folder.finished_out_dir()
    return done == str(out_dir.absolute()) and (out_dir / "config.json").exists()


def _record(
    job_id: str, options: ConversionOptions, plan: Plan | None, source: Source
) -> dict[str, Any]:
    return {
        "format": RECORD_FORMAT,
        "id": job_id,
        "options": options.to_json(),
        "qkv_topology": plan.to_json() if plan is not None else None,
        "source": source.fingerprint(),
    }


def _notes(
    folder: JobFolder, layout: JobLayout, options: ConversionOptions, changed: tuple[str, ...]
) -> tuple[str, ...]:
    """Consequences of changed options.

    Raises:
        ConversionError: finished MTP modules contradict a new -mb.
    """
    done = [module.key for module in layout.mtp if folder.has_module(module.key)]
    if "mtp_bits" in changed and done:
        raise ConversionError(
            f"{folder.path}: -mb cannot change any more, {done[0]} is finished; leave the option "
            f"out, or start a new job in an empty folder"
        )
    count = sum(folder.has_module(module.key) for module in layout.all)
    return tuple(
        f"{name} is {getattr(options, name)} from here on; the {count} finished modules keep theirs"
        for name in ("codebook", "out_scales")
        if name in changed and count
    )


def check_devices(devices: Sequence[str]) -> None:
    """Refuse devices that this machine does not have, or this build cannot use.

    Raises:
        ConversionError: names the device and what there is.
        UnsupportedError: the device is there, kernels for it are not.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = "use " + " or ".join(["cpu", *map(str, range(count))])
    if not count:
        there = f"torch {torch.__version__} sees no GPU; {there}"
    for name in devices:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConversionError(f"-d: {name!r} is no device; {there}") from error
        if device == torch.device("cpu"):
            continue
        if device.type != "cuda" or device.index is None or device.index >= count:
            raise ConversionError(f"-d: device {name!r} does not exist here; {there}")
        require_device(device)


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """The paths among option values, so that a job can be resumed from another folder."""
    names = ("in_dir", "work_dir", "out_dir", "cal_data")
    return {name: os.path.abspath(values[name]) for name in names if values.get(name)}


def _check_paths(options: ConversionOptions) -> None:
    """Source, work and output must be three folders."""
    named = {"-i": options.in_dir, "-w": options.work_dir, "-o": options.out_dir}
    resolved = {flag: Path(os.path.realpath(path)) for flag, path in named.items()}
    for one, two in (("-i", "-o"), ("-i", "-w"), ("-w", "-o")):
        if resolved[one] == resolved[two]:
            raise ConversionError(
                f"{named[two]}: {one} and {two} are the same folder; source, work folder and "
                f"output must be different"
            )
    for inner, outer in (("-w", "-o"), ("-o", "-w")):
        if resolved[outer] in resolved[inner].parents:
            raise ConversionError(
                f"{named[inner]}: {inner} is inside {outer} ({named[outer]}), where a job removes "
                f"what it has written; give work folder and output separate places"
            )


def _stored_plan(
    stored: str | None, given: str | None, changed: tuple[str, ...], where: str
) -> Plan | None:
    if stored is None and given is None:
        return None
    plan = topology_step.resumed_plan(stored, given, where)
    topology_step.refuse_new_defaults(changed, where)
    return plan
