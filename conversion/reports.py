"""What a job tells about itself while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from exllamav3.errors import FormatError

from .fidelity import Fidelity


@dataclass(frozen=True, slots=True)
class LinearReport:
    """One quantized linear.

    bits, codebook: of its trellis
    proxy_error: tr(E^T H E) / tr(W^T H W) in the original basis, None without a Hessian
    rmse: ||W - W_hat|| / ||W||, whether or not there was a Hessian
    g_scale: global scale found by the search
    out_scales: whether output channel scales were used
    fallback: quantized without error feedback
    zeros: the weight is all zero
    seconds: spent on it
    """

    key: str
    bits: int
    codebook: str
    proxy_error: float | None
    rmse: float | None
    g_scale: float
    out_scales: bool
    fallback: bool
    zeros: bool
    seconds: float

    def line(self) -> str:
        """One line for people: key, rate, error, flags (o output scales, f fallback), g, time."""
        if self.zeros:
            error = "all zero         "
        elif self.proxy_error is not None:
            error = f"proxy err {self.proxy_error:.2e}"
        elif self.rmse is not None:
            error = f"rmse      {self.rmse:.2e}"
        else:
            error = "error unknown    "
        flags = ("o" if self.out_scales else "-") + ("f" if self.fallback else "-")
        return (
            f"  {self.key:<52} {self.bits} bits {self.codebook:<5} {error}  {flags}  "
            f"g {self.g_scale:.4f}  {self.seconds:6.2f} s"
        )


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One finished top-level module.

    bits: mean bits per stored weight over all its tensors, scales and norms included
    bad_rows: calibration rows whose output is not finite, dropped from here on
    seconds: spent on capturing and quantizing
    """

    key: str
    linears: tuple[LinearReport, ...]
    bits: float
    bad_rows: tuple[int, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModuleReport:
        """Read back what `to_json` gave. FormatError when it is something else."""
        try:
            linears = tuple(LinearReport(**linear) for linear in values["linears"])
            bad_rows = tuple(values["bad_rows"])
            return cls(values["key"], linears, values["bits"], bad_rows, values["seconds"])
        except (KeyError, TypeError) as error:
            raise FormatError(f"the report of a module is damaged ({error!r})") from error


class Listener(Protocol):
    """Receives the progress of a job; see `console.py` for the one people see."""

    def message(self, text: str) -> None:
        """One line of information."""
        ...

    def detail(self, text: str) -> None:
        """One line that only verbose output shows."""
        ...

    def start(self, weights: Mapping[str, int], skipped: int) -> None:
        """The module loop begins.

        Args:
            weights: by key, how many weights have to be quantized in each module that the loop
                will pass; 0 for one that an earlier run has quantized.
            skipped: finished modules that the loop does not pass.
        """
        ...

    def stage(self, key: str, name: str, total: float) -> None:
        """A stage of a module begins: `total` units of work."""
        ...

    def advance(self, amount: float) -> None:
        """Some of the stage's work is done; called from worker threads."""
        ...

    def linear(self, report: LinearReport) -> None:
        """A linear is quantized."""
        ...

    def module(self, report: ModuleReport, fidelity: Fidelity | None, resumed: bool) -> None:
        """A module is finished; `resumed` when an earlier run had quantized it."""
        ...

    def stop(self) -> None:
        """The module loop ended, or an error ends it."""
        ...


class Silent:
    """A listener that says nothing."""

    def message(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...

    def start(self, weights: Mapping[str, int], skipped: int) -> None: ...

    def stage(self, key: str, name: str, total: float) -> None: ...

    def advance(self, amount: float) -> None: ...

    def linear(self, report: LinearReport) -> None: ...

    def module(self, report: ModuleReport, fidelity: Fidelity | None, resumed: bool) -> None: ...

    def stop(self) -> None: ...
