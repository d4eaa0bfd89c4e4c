"""A conversion job: created or resumed, then run to the end.

    options = ConversionOptions(in_dir="model", work_dir="work", out_dir="out", bits=4.0)
    convert(options, qkv_topology="plan.json")

A job is a function of options, plan and source: the same three give the same
bytes on the same machine and device, however often it was interrupted.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exllamav3.codec.bit_rate import BitRate
from exllamav3.modules.module import Module

from .checkpoints import Checkpoint
from .durable import Step, ignore_step
from .layout import describe
from .options import ConversionOptions
from .output import write_output
from .pipeline import CalibrationState, ModulePipeline
from .replicas import Replicas
from .reports import Listener, ModuleReport, Silent
from .start import StartedJob, is_finished, start_new, start_resumed


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What a finished job made.

    out_dir: the checkpoint folder
    rate: mean bits per weight, without and with the head
    modules: one report per top-level module, decoder first; empty if it was finished before
    """

    out_dir: Path
    rate: BitRate
    modules: tuple[ModuleReport, ...]

    @property
    def mean_bits(self) -> float:
        """Achieved over the decoder's linears, which share the budget; 0 without any."""
        return self.rate.decoder or 0.0


class ConversionJob:
    """One job, holding the lock on its work folder until `close`. Use as a context manager."""

    def __init__(self, started: StartedJob, listener: Listener) -> None:
        """Use `create` or `resume` instead."""
        self.folder, self.output = started.folder, started.output
        self.options, self.source, self.layout = started.options, started.source, started.layout
        self.listener = listener
        self._last_checkpoint = time.monotonic()
        for note in started.notes:
            listener.message(note)

    @classmethod
    def create(
        cls,
        options: ConversionOptions,
        qkv_topology: str | None = None,
        listener: Listener | None = None,
        step: Step = ignore_step,
    ) -> ConversionJob:
        """Check everything that can be checked without reading a weight, and store the job.

        Args:
            options: see `ConversionOptions`.
            qkv_topology: path of a plan, None for all split with no declaration.
            listener: receives progress; silent by default.
            step: called before durable steps, for tests.

        Raises:
            ConversionError: folders, source, calibration text or disk space do not allow the job.
            TopologyError: the plan is malformed or does not fit.
            FormatError, UnsupportedError: the source cannot be read here.
        """
        return cls(start_new(options, qkv_topology, step), listener or Silent())

    @classmethod
    def resume(
        cls,
        work_dir: str,
        given: Mapping[str, Any] | None = None,
        qkv_topology: str | None = None,
        listener: Listener | None = None,
        step: Step = ignore_step,
    ) -> ConversionJob:
        """Take up a stored job.

        Args:
            work_dir: its folder.
            given: option values stated explicitly this time, by field name; see
                `options.OVERRIDABLE` for those that may differ from the stored ones.
            qkv_topology: None keeps the stored plan; a path must hold the same plan.

        Raises:
            ConversionError: no job here, or it cannot go on with what was given.
            TopologyError: another plan was given.
        """
        return cls(start_resumed(work_dir, given or {}, qkv_topology, step), listener or Silent())

    def __enter__(self) -> ConversionJob:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the work folder."""
        self.folder.close()

    # -- running

    def run(self) -> ConversionResult:
        """Convert what is not converted yet and write the output folder.

        Raises:
            ConversionError: the job cannot go on; the message says whether resuming is safe.
        """
        if is_finished(self.folder, self.options):
            self.output.release()
            self.listener.message(f"{self.options.out_dir}: this job is finished already")
            return ConversionResult(self.output.path, self.layout.rate, ())
        for line in describe(self.layout, self.source, self.options):
            self.listener.message(line)
        reports: list[ModuleReport] = []
        checkpoint = self._newest_checkpoint()
        pending = self._pending(checkpoint)
        self.listener.start(pending, len(self.layout.all) - len(pending))
        try:
            if checkpoint is not None:
                self._convert_decoder(checkpoint, reports)
            self._convert_mtp(reports)
        finally:
            self.listener.stop()
        self.folder.checkpoints.drop()
        write_output(
            self.folder, self.output, self.source, self.layout, self.options, self.listener
        )
        self.folder.step("before finished")
        self.folder.mark_finished(self.output.path.absolute())
        self.output.release()
        return ConversionResult(self.output.path, self.layout.rate, tuple(reports))

    def _pending(self, checkpoint: Checkpoint | None) -> dict[str, int]:
        """Modules that will be passed, and how many weights of each have to be quantized."""
        pending = {}
        for number, module in enumerate(self.layout.all):
            done = self.folder.has_module(module.key)
            again = checkpoint is not None and (
                checkpoint.next_module <= number < len(self.layout.decoder)
            )
            if again or not done:
                weights = sum(target.weights for target in module.targets)
                pending[module.key] = 0 if done else weights
        return pending

    def _convert_decoder(self, checkpoint: Checkpoint, reports: list[ModuleReport]) -> None:
        layouts = self.layout.decoder
        devices = [torch.device(name) for name in self.options.devices]
        topology = self.layout.topology
        pipeline = ModulePipeline(
            Replicas(self.source.decoder, devices),
            Replicas(lambda: self.source.decoder(topology), devices),
            self.source.tensors,
            self.options,
            self.listener,
        )
        state = CalibrationState(list(checkpoint.rows), set(checkpoint.bad_rows))
        for index in range(checkpoint.next_module, len(layouts)):
            layout, last = layouts[index], index + 1 == len(layouts)
            resumed = self.folder.has_module(layout.key)
            if resumed:
                tensors = self.folder.load_module(layout.key)
                report = ModuleReport.from_json(self.folder.module_report(layout.key))
                converted = pipeline.recover(index, state, tensors, report)
            else:
                converted = pipeline.convert(index, layout, state)
                self._save(layout.key, converted.tensors, converted.report)
            start = time.monotonic()
            fidelity = pipeline.advance(index, converted, state, last)
            self.listener.module(converted.report, fidelity, resumed)
            self.listener.detail(
                f"   advanced in {time.monotonic() - start:.1f} s; peak memory "
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB"
            )
            reports.append(converted.report)
            if not last:
                self._maybe_checkpoint(index + 1, state)

    def _convert_mtp(self, reports: list[ModuleReport]) -> None:
        if not self.layout.mtp:
            return
        device = [torch.device(self.options.devices[0])]
        modules: Sequence[Module] = self.source.mtp()
        pipeline = ModulePipeline(
            Replicas(lambda: modules, device),
            Replicas(lambda: modules, device),
            self.source.tensors,
            self.options,
            self.listener,
        )
        for index, layout in enumerate(self.layout.mtp):
            if self.folder.has_module(layout.key):
                continue
            converted = pipeline.convert(index, layout, CalibrationState([]))
            self._save(layout.key, converted.tensors, converted.report)
            self.listener.module(converted.report, None, False)
            reports.append(converted.report)

    def _save(self, key: str, tensors: Mapping[str, Tensor], report: ModuleReport) -> None:
        self.folder.save_module(key, tensors, report.to_json())

    def _newest_checkpoint(self) -> Checkpoint | None:
        """The stored state that saves most work, or the token rows; None if none is needed."""
        stored = [self.folder.has_module(layout.key) for layout in self.layout.decoder]
        if all(stored):
            return None
        shape = (self.options.cal_rows, self.options.cal_cols)
        checkpoint = self.folder.checkpoints.load(
            stored.index(False), shape[0], self.listener.message
        )
        if checkpoint is not None:
            return checkpoint
        return Checkpoint(0, tuple(self.folder.token_rows(shape).unbind(0)), ())

    def _maybe_checkpoint(self, next_module: int, state: CalibrationState) -> None:
        if time.monotonic() - self._last_checkpoint < self.options.checkpoint_interval:
            return
        bad_rows = tuple(sorted(state.bad_rows))
        self.folder.checkpoints.save(Checkpoint(next_module, tuple(state.rows), bad_rows))
        self._last_checkpoint = time.monotonic()


def convert(
    options: ConversionOptions, qkv_topology: str | None = None, listener: Listener | None = None
) -> ConversionResult:
    """Create a job and run it to the end; see `ConversionJob.create` and `run` for errors."""
    with ConversionJob.create(options, qkv_topology, listener) as job:
        return job.run()
