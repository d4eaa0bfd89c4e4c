"""Which code serves the operators on which device, and refusals that say why.

Nothing falls back silently: a device that this build cannot serve is refused by
`require_device`, and a caller that must not run on the slow references says so with
`require_native`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from exllamav3.errors import ExtensionError, UnsupportedError

try:
    import exllamav3_ext
except ImportError as error:
    raise ExtensionError(str(error)) from error

REBUILD = "pip install --no-build-isolation -e ."


def build_info() -> dict[str, Any]:
    """What serves the operators; see `exllamav3_ext.build_info`."""
    return exllamav3_ext.build_info()


def backend(op: str, device: str | torch.device) -> str:
    """Name of the code that serves `torch.ops.exllamav3.<op>` on a device.

    Returns:
        "native" or "reference".
    """
    key = torch.device(device).type.upper()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"exllamav3::{op}", key)
    return "native" if has_kernel else "reference"


def require_native(op: str, device: str | torch.device) -> None:
    """Refuse to go on if `op` would run on its slow torch reference.

    Raises:
        ExtensionError: no native kernel; the message says why and how to build one.
    """
    if backend(op, device) == "native":
        return
    reason = exllamav3_ext.native_missing_reason or f"this build has no {device} kernel for it"
    raise ExtensionError(f"operator {op} has no native code: {reason}. Build it with: {REBUILD}")


@cache
def require_device(device: torch.device) -> None:
    """Refuse a device that this build cannot serve.

    The CPU is always served. A CUDA device needs a build with CUDA kernels for its
    architecture; only without any native code do the torch references serve it.

    Raises:
        UnsupportedError: the message gives the reason and the way out.
    """
    if device.type == "cpu" or device.type == "meta" or exllamav3_ext.native_missing_reason:
        return
    if device.type != "cuda":
        raise UnsupportedError(f"device {device} is not supported: use the CPU or a CUDA device")
    info = build_info()
    if info["kind"] != "cuda":
        if torch.version.cuda is None:
            raise UnsupportedError(
                f"device {device}: torch {torch.__version__} is a build without CUDA. Install one "
                f"with CUDA and rebuild with {REBUILD}, or use the CPU."
            )
        raise UnsupportedError(
            f"device {device}: exllamav3 was built without CUDA kernels (kind {info['kind']!r}; "
            f"nvcc was not found or not asked for). Install the CUDA toolkit and rebuild with "
            f"EXLLAMAV3_BUILD=cuda {REBUILD}, or use the CPU."
        )
    require_present(device)
    major, minor = torch.cuda.get_device_capability(device)
    if not any(_runs_on(arch, major, minor) for arch in info["archs"]):
        raise UnsupportedError(
            f"device {device} has compute capability {major}.{minor}, but exllamav3 was built for "
            f"{', '.join(info['archs'])}. Rebuild with EXLLAMAV3_CUDA_ARCHS={major}{minor}."
        )


def require_present(device: torch.device) -> None:
    """Refuse a GPU that is not there, which torch would answer with an error of its own.

    Raises:
        UnsupportedError: the message lists the GPUs there are.
    """
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = ", ".join(f"cuda:{n}" for n in range(count)) or "none (is a driver installed?)"
        raise UnsupportedError(
            f"device {device} does not exist here. GPUs that torch sees: {there}. Use another "
            f"device, such as cpu."
        )


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether machine code for `arch` ("80", "90a", "120f") runs on a device major.minor."""
    number = int(arch.rstrip("af"))
    built_major, built_minor = divmod(number, 10)
    if built_major != major:
        return False
    return built_minor == minor if arch.endswith("a") else built_minor <= minor
