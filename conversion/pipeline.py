"""From the source tensors of one module to its output tensors, and the state behind it.

    capture    calibration rows through the dense module: Hessians and reference outputs
    quantize   one linear after another from the source's own weights
    advance    the rows through the module as it will be loaded, fused where it is fused

Only one module's weights are in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from exllamav3.errors import ConversionError, FormatError
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import DictSource, TensorSource
from exllamav3.quant import (
    Hessian,
    HessianAccumulator,
    QuantSettings,
    pad_weight,
    quantize_linear,
)

from .capture import HessianCapture, sensitive_mlps, use_output_scales
from .fidelity import REFERENCE_ROWS, Fidelity, compare
from .options import ConversionOptions
from .replicas import Replicas
from .reports import LinearReport, Listener, ModuleReport
from .summaries import linear_report, module_report
from .targets import ModuleLayout, QuantTarget
from .weights import derive_seed, read_components, to_float16

HEAD_TOKENS = 128
"""Tokens of each reference row on which lm_head is compared: its outputs are wide."""
MAX_BAD_SHARE = 0.1
"""A job stops when more than this share of the calibration rows is not finite."""


@dataclass(slots=True)
class CalibrationState:
    """The calibration rows in front of the next module: ids, then hidden states, on the CPU."""

    rows: list[Tensor]
    bad_rows: set[int] = field(default_factory=set)

    def good(self) -> list[int]:
        """Numbers of the rows still in use."""
        return [number for number in range(len(self.rows)) if number not in self.bad_rows]

    def drop(self, numbers: Iterable[int], key: str) -> None:
        """Exclude rows from here on.

        Raises:
            ConversionError: too many rows are excluded.
        """
        self.bad_rows.update(numbers)
        if len(self.bad_rows) > MAX_BAD_SHARE * len(self.rows):
            raise ConversionError(
                f"{key}: {len(self.bad_rows)} of {len(self.rows)} calibration rows have become "
                f"infinite or not-a-number here. Check the source weights, or calibrate with "
                f"other text (-cd); --resume would fail in the same place"
            )


@dataclass(frozen=True, slots=True)
class Captured:
    """What the dense module showed.

    accumulators: undivided Hessian sums by input label
    sensitivities: of the outputs of gate and up projections with the policy "auto"
    references: outputs of the first good rows, by row number
    bad_rows: rows whose output is not finite
    """

    accumulators: dict[str, HessianAccumulator]
    sensitivities: dict[str, Tensor]
    references: dict[int, Tensor]
    bad_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Converted:
    """Output tensors of a module by name, its report, and the dense module's outputs."""

    tensors: dict[str, Tensor]
    report: ModuleReport
    references: dict[int, Tensor]


class ModulePipeline:
    """Converts top-level modules of a decoder one by one."""

    def __init__(
        self,
        dense: Replicas,
        quantized: Replicas,
        source: TensorSource,
        options: ConversionOptions,
        listener: Listener,
    ) -> None:
        """`dense` loads from `source`; `quantized` is the same model as it will be loaded."""
        self.dense, self.quantized, self.source = dense, quantized, source
        self.options, self.listener = options, listener

    def convert(self, index: int, layout: ModuleLayout, state: CalibrationState) -> Converted:
        """Capture and quantize one module. The state stays where it is."""
        start = time.monotonic()
        captured = self._capture(index, layout, state)
        tensors: dict[str, Tensor] = {}
        linears: list[LinearReport] = []
        hessians: dict[str, Hessian] = {}
        self.listener.stage(layout.key, "quantizing", sum(t.weights for t in layout.targets))
        for number, target in enumerate(layout.targets):
            label = target.qmap
            if label is not None and label not in hessians:
                seed = derive_seed(self.options.seed, f"{layout.key}/{label}")
                hessians[label] = captured.accumulators.pop(label).finish(seed)
            hessian = hessians[label] if label is not None else None
            made, linear = self._quantize(target, hessian, captured.sensitivities.get(target.key))
            tensors.update(made)
            linears.append(linear)
            self.listener.linear(linear)
            if label is not None and label not in {t.qmap for t in layout.targets[number + 1 :]}:
                del hessians[label]
        tensors.update(self.unquantized(layout))
        seconds = time.monotonic() - start
        report = module_report(layout, tensors, linears, captured.bad_rows, seconds)
        return Converted(tensors, report, captured.references)

    def recover(
        self,
        index: int,
        state: CalibrationState,
        tensors: dict[str, Tensor],
        report: ModuleReport,
    ) -> Converted:
        """What `convert` returned in an earlier run, from its stored tensors and report."""
        references: dict[int, Tensor] = {}
        if report.linears:
            numbers = [n for n in self._reference_numbers(state) if n not in report.bad_rows]
            self.dense.load(index, self.source)
            outputs = self.dense.forward(index, self._rows(index, state, numbers))
            self.dense.unload(index)
            references = dict(zip(numbers, outputs, strict=True))
        return Converted(tensors, report, references)

    def advance(
        self, index: int, converted: Converted, state: CalibrationState, last: bool = False
    ) -> Fidelity | None:
        """Move the state behind a module; compares the first rows with their references.

        Args:
            last: nothing follows, so only the reference rows are computed.
        """
        key = converted.report.key
        numbers = list(converted.references)
        self.quantized.load(index, DictSource(converted.tensors, f"the tensors made for {key}"))
        if last:
            made = self.quantized.forward(index, self._rows(index, state, numbers))
        else:
            state.drop(converted.report.bad_rows, key)
            good = state.good()
            self.listener.stage(key, "advancing", len(good))
            moved, finite = self.quantized.advance(
                index, [state.rows[n] for n in good], self.listener.advance
            )
            for number, row in zip(good, moved, strict=True):
                state.rows[number] = row
            state.drop((n for n, fine in zip(good, finite, strict=True) if not fine), key)
            made = [state.rows[n] for n in numbers]
        self.quantized.unload(index)
        return compare(list(converted.references.values()), made)

    def unquantized(self, layout: ModuleLayout) -> dict[str, Tensor]:
        """Tensors that are copied or stored as float16."""
        tensors = {name: self.source.get(name) for name in layout.kept}
        for linear in layout.halved:
            names = linear.own_names(self.source.names())
            tensors[f"{linear.key}.weight"] = to_float16(self.source.get(names[0]), names[0])
            if linear.has_bias:
                tensors[f"{linear.key}.bias"] = to_float16(self.source.get(names[1]), names[1])
        return tensors

    def _capture(self, index: int, layout: ModuleLayout, state: CalibrationState) -> Captured:
        labels = {target.qmap for target in layout.targets if target.qmap is not None}
        if not labels:
            return Captured({}, {}, {}, ())
        self.dense.load(index, self.source)
        scales = {target.key: target.scale for target in layout.targets}
        captures = [
            HessianCapture(labels, device, sensitive_mlps(module, scales))
            for module, device in zip(self.dense.modules(index), self.dense.devices, strict=True)
        ]
        good, references = state.good(), self._reference_numbers(state)
        self.listener.stage(layout.key, "capturing", len(good))
        head = self.dense.primary[index]
        bad: tuple[int, ...] = ()
        if isinstance(head, Linear):
            # Its input is the state itself; no need to compute a vocabulary of outputs per token.
            for number in good:
                x = state.rows[number].to(self.dense.devices[0])
                captures[0].observe(str(head.qmap), head.key, x)
                self.listener.advance(1)
            outputs = self.dense.forward(index, self._rows(index, state, references))
        else:
            rows = [state.rows[number] for number in good]
            finite, outputs = self.dense.observe(
                index, rows, captures, len(references), self.listener.advance
            )
            bad = tuple(number for number, fine in zip(good, finite, strict=True) if not fine)
        for other in captures[1:]:
            captures[0].merge(other)
        sensitivities = captures[0].sensitivities()
        self.dense.unload(index)
        kept = {n: y for n, y in zip(references, outputs, strict=True) if n not in bad}
        return Captured(captures[0].accumulators, sensitivities, kept, bad)

    def _reference_numbers(self, state: CalibrationState) -> list[int]:
        return state.good()[:REFERENCE_ROWS]

    def _rows(self, index: int, state: CalibrationState, numbers: Sequence[int]) -> list[Tensor]:
        """Inputs for comparing a module; cut short where outputs are as wide as a vocabulary."""
        is_head = isinstance(self.dense.primary[index], Linear)
        rows = [state.rows[number] for number in numbers]
        return [row[:HEAD_TOKENS] for row in rows] if is_head else rows

    def _quantize(
        self, target: QuantTarget, hessian: Hessian | None, sensitivity_O: Tensor | None
    ) -> tuple[dict[str, Tensor], LinearReport]:
        device = self.dense.devices[0]
        weight_OI, bias_O = read_components(target, self.source)
        out_scales = use_output_scales(target.scale, weight_OI, sensitivity_O)
        bias_O = None if bias_O is None else bias_O.to(device)
        weight_KN, bias_N = pad_weight(weight_OI.to(device), bias_O)
        settings = QuantSettings(
            target.bits, target.codebook, out_scales, derive_seed(self.options.seed, target.key)
        )
        try:
            tensor, report = quantize_linear(
                weight_KN, hessian, settings, bias_N, progress_of(target, self.listener)
            )
        except FormatError as error:  # the quantizer does not know which matrix it was given
            raise FormatError(f"{target.key}: {error}") from error
        made = {name: value.cpu() for name, value in tensor.to_tensors(target.key).items()}
        return made, linear_report(target, report)


def progress_of(target: QuantTarget, listener: Listener) -> Callable[[float], None]:
    """Turn a linear's growing fraction (0 to 1) into amounts of weights."""
    seen = 0.0

    def progress(fraction: float) -> None:
        nonlocal seen
        listener.advance((fraction - seen) * target.weights)
        seen = fraction

    return progress
