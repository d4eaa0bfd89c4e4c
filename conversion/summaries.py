"""From what the quantizer measured to the reports of a job."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exllamav3.quant import QuantReport

from .reports import LinearReport, ModuleReport
from .targets import ModuleLayout, QuantTarget


def linear_report(target: QuantTarget, report: QuantReport) -> LinearReport:
    return LinearReport(
        key=target.key,
        bits=target.bits,
        codebook=target.codebook.value,
        proxy_error=report.proxy_error,
        rmse=report.rmse,
        g_scale=report.g_scale,
        out_scales=report.out_scales,
        fallback=report.fallback,
        zeros=report.zeros,
        seconds=report.seconds,
    )


def module_report(
    layout: ModuleLayout,
    tensors: dict[str, Tensor],
    linears: Sequence[LinearReport],
    bad_rows: tuple[int, ...],
    seconds: float,
) -> ModuleReport:
    """Summary of a module; bits per weight count every tensor's bytes over the stored weights."""
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weights = sum(target.weights for target in layout.targets)
    weights += sum(tensors[name].numel() for name in layout.kept)
    weights += sum(linear.in_features * linear.out_features for linear in layout.halved)
    bits = 8.0 * size_bytes / weights if weights and linears else 0.0
    return ModuleReport(layout.key, tuple(linears), bits, bad_rows, seconds)
