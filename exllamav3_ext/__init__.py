"""Native code of exllamav3: op schemas, and the compiled kernels behind them if there are any.

Importing this package makes every name below `torch.ops.exllamav3` exist. It then
loads, in this order,
    1. `_C`, the compiled module beside this file,
    2. a just-in-time build, only if EXLLAMAV3_JIT=1,
    3. nothing: the slow torch references in `exllamav3.ops.reference` serve, and one
       log line says so.
A `_C` that exists but does not load is an ImportError, never a fallback.
EXLLAMAV3_BUILD=none skips 1 and 2.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from exllamav3_ext import _build, _driver, schema

__all__ = ["build_info", "native_missing_reason", "schema"]

_log = logging.getLogger("exllamav3")


def _load_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("exllamav3_ext._C", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python extension module")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except ImportError as error:
        raise ImportError(
            f"the native code {path} exists but does not load under torch {torch.__version__}: "
            f"{error}. Rebuild it with `pip install --no-build-isolation -e .`, or set "
            f"EXLLAMAV3_BUILD=none to run on the slow references."
        ) from error


def _load_native() -> str | None:
    """Load compiled kernels; returns why there are none, or None when they are loaded."""
    if _build.requested_kind() == "none":
        return "EXLLAMAV3_BUILD=none"
    beside = Path(__file__).parent / _build.EXTENSION_NAME
    if beside.exists():
        _load_file(beside)
        return None
    if os.environ.get("EXLLAMAV3_JIT") == "1":
        kind = _build.detect()
        folder = _driver.jit_directory(kind)
        _log.info("building native code in %s", folder)
        try:
            _driver.build(kind, folder, folder / _build.EXTENSION_NAME)
        except _build.BuildError as error:
            raise ImportError(f"EXLLAMAV3_JIT=1: {error}") from error
        _load_file(folder / _build.EXTENSION_NAME)
        return None
    return f"{beside} has not been built (pip install --no-build-isolation -e .)"


def build_info() -> dict[str, Any]:
    """What serves the operators, for benchmarks and bug reports.

    Keys: `native` (bool), `torch`, and with native code `kind` ("cpu" or "cuda"),
    `archs` (CUDA architectures), `isa` (CPU path in use now), `compiler`,
    `torch_target`, `stale` (the sources have changed since the build); without it,
    `reason`.
    """
    info: dict[str, Any] = {"native": native_missing_reason is None, "torch": torch.__version__}
    if native_missing_reason is not None:
        return {**info, "reason": native_missing_reason}
    info.update(json.loads(torch.ops.exllamav3.build_info()))
    info["archs"] = [arch for arch in info["archs"].split(",") if arch]
    info["stale"] = info.pop("source_hash") != _build.source_hash()
    return info


native_missing_reason: str | None = _load_native()
"""Why there is no native code, or None when it is loaded."""

if native_missing_reason is not None:
    _log.warning("exllamav3 runs on slow torch references: %s", native_missing_reason)
elif build_info()["stale"]:
    _log.warning(
        "exllamav3_ext/_C is older than its sources: pip install --no-build-isolation -e ."
    )
