"""What is built: THE list of sources and flags, and the choice of a kind of build.

`_driver.py` turns it into commands, for `setup.py` (ahead of time) and for
`exllamav3_ext/__init__.py` (just in time) alike.

To add a file, add one line to `CPU_SOURCES` or `CUDA_SOURCES`.

Environment (read here and in `_driver.py`, nowhere else):
    EXLLAMAV3_BUILD       auto (default) | cpu | cuda | none
    EXLLAMAV3_CUDA_ARCHS  e.g. "80;90a"; default: the GPUs of this machine, or 90a without one
    MAX_JOBS              parallel compiler processes; default: the number of CPUs, at most 8
    CXX, CUDA_HOME        as usual
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent / "csrc"
EXTENSION_NAME = "_C.abi3.so"
KINDS = ("auto", "cpu", "cuda", "none")

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",  # g++ 12 takes its own intrinsics for it
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """One translation unit below csrc/ and the flags that it alone gets."""

    path: str
    flags: tuple[str, ...] = ()
    x86_only: bool = False


# Files that name an instruction set are entered only after a check at run time
# (csrc/cpu/dispatch.h); every other file is plain x86-64 or whatever the machine is.
CPU_SOURCES = (
    Source("module.cpp"),
    Source("cpu/dispatch.cpp"),
    Source("cpu/bind_codec.cpp"),
    Source("cpu/bind_linear.cpp"),
    Source("cpu/bind_attention.cpp"),
    Source("cpu/bind_search.cpp"),
    Source("cpu/kernels_portable.cpp"),
    Source("cpu/kernels_avx2.cpp", AVX2, x86_only=True),
    Source("cpu/kernels_avx512.cpp", AVX512, x86_only=True),
    Source("cpu/viterbi.cpp"),
    Source("cpu/viterbi_tables.cpp"),
    Source("cpu/viterbi_portable.cpp"),
    Source("cpu/viterbi_avx2.cpp", AVX2, x86_only=True),
    Source("cpu/viterbi_avx512.cpp", AVX512, x86_only=True),
)

# Kernels (.cu) include no torch header; bind_*.cpp files do and launch nothing themselves.
CUDA_SOURCES: tuple[Source, ...] = (
    Source("cuda/bind_search.cpp"),
    Source("cuda/bind_run_path.cpp"),
    Source("cuda/run_path.cu"),
    Source("cuda/delta_rule.cu"),
    Source("cuda/viterbi.cu"),
    *(Source(f"cuda/viterbi_k{bits}.cu") for bits in range(1, 9)),
    Source("cuda/bind_codec.cpp"),
    Source("cuda/bind_linear.cpp"),
    Source("cuda/codec.cu"),
    Source("cuda/columns.cu"),
    Source("cuda/counters.cpp"),
    Source("cuda/linear_plan.cpp"),
    Source("cuda/linear_launch.cu"),
    *(
        Source(f"cuda/instances/linear_r{rows}_{part}.cu")
        for part in ("group", *(f"k{bits}" for bits in range(1, 9)), "half")
        for rows in (2, 8, 16, 32)
    ),
    Source("cuda/reconstruct.cu"),
)

# Anything fused is written as such in the source: the compiler never contracts a*b+c, so that
# every path, whatever its instruction set, computes what the references compute.
CXX_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi",
)  # fmt: skip
NVCC_FLAGS = (
    "-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr",
    "-lineinfo",
)  # fmt: skip
DEFINES = (
    "-DPy_LIMITED_API=0x030A0000",  # CPython 3.10
    "-DTORCH_TARGET_VERSION=0x020A000000000000",  # torch 2.10
)


class BuildError(RuntimeError):
    """The extension cannot be built; the message says what is missing and what to do."""


def requested_kind() -> str:
    """Value of EXLLAMAV3_BUILD, checked."""
    kind = os.environ.get("EXLLAMAV3_BUILD", "auto").strip().lower() or "auto"
    if kind not in KINDS:
        raise BuildError(f"EXLLAMAV3_BUILD is {kind!r}, expected one of {', '.join(KINDS)}")
    return kind


def detect() -> str:
    """Resolve EXLLAMAV3_BUILD to "cpu", "cuda" or "none".

    `auto` is `cuda` only where torch is a CUDA build *and* nvcc is found. Whether a
    GPU is plugged in does not matter for a build.
    """
    kind = requested_kind()
    if kind == "auto":
        import torch

        return "cuda" if torch.version.cuda and find_nvcc() else "cpu"
    if kind == "cuda" and not find_nvcc():
        raise BuildError(
            "EXLLAMAV3_BUILD=cuda, but no CUDA toolkit (nvcc and cuda_runtime.h) was found on "
            "PATH, in CUDA_HOME or in /usr/local/cuda. Install it, or use EXLLAMAV3_BUILD=cpu."
        )
    return kind


def cuda_home() -> Path | None:
    """Directory of the CUDA toolkit (it holds include/cuda_runtime.h), or None.

    Looks at CUDA_HOME, at the place of nvcc, and at /usr/local/cuda.
    """
    candidates = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):  # which may be a wrapper script outside the toolkit
        candidates.append(Path(nvcc).resolve().parent.parent)
    candidates.append(Path("/usr/local/cuda"))
    for candidate in candidates:
        if (candidate / "include" / "cuda_runtime.h").exists():
            return candidate
    return None


def find_nvcc() -> str | None:
    """Path of nvcc, or None unless its headers are there too."""
    home = cuda_home()
    if home is None:
        return None
    inside = home / "bin" / "nvcc"
    return str(inside) if inside.exists() else shutil.which("nvcc")


def cuda_archs() -> tuple[str, ...]:
    """Compute capabilities to compile for, such as ("80", "90a")."""
    if value := os.environ.get("EXLLAMAV3_CUDA_ARCHS"):
        archs = tuple(part for part in re.split(r"[;, ]+", value) if part)
        for arch in archs:
            if not re.fullmatch(r"\d{2,3}[af]?", arch):
                raise BuildError(
                    f'EXLLAMAV3_CUDA_ARCHS holds {arch!r}, expected e.g. "80;86;89;90a"'
                )
        return archs
    import torch

    found = set()
    if torch.cuda.is_available():
        for device in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(device)
            found.add(f"{major}{minor}" + ("a" if major >= 9 else ""))
    return tuple(sorted(found)) or ("90a",)


def sources(kind: str) -> tuple[Source, ...]:
    """Translation units of a build of this kind."""
    is_x86 = os.uname().machine in ("x86_64", "AMD64")
    every = CPU_SOURCES + (CUDA_SOURCES if kind == "cuda" else ())
    return tuple(source for source in every if is_x86 or not source.x86_only)


def source_hash() -> str:
    """Digest of every file below csrc/; compiled in, so that a stale `_C` is noticed."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(CSRC)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cxx_flags(kind: str) -> list[str]:
    """Flags of every g++ translation unit."""
    import torch

    include = Path(torch.__file__).parent / "include"
    flags = [*CXX_FLAGS, *DEFINES, f"-I{CSRC}", f"-isystem{include}"]
    flags.append(f"-isystem{include / 'torch/csrc/api/include'}")
    flags.append(f"-isystem{sysconfig.get_path('include')}")
    if kind == "cuda":
        flags += ["-DUSE_CUDA", f"-isystem{cuda_home()}/include"]
    return flags


def nvcc_flags() -> list[str]:
    """Flags of every nvcc translation unit."""
    archs = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in cuda_archs()]
    return [*NVCC_FLAGS, *DEFINES, "-DUSE_CUDA", f"-I{CSRC}", *archs]


def link_flags(kind: str) -> list[str]:
    """Flags of the link. A CUDA torch must pull in its CUDA library through libtorch."""
    import torch

    lib = Path(torch.__file__).parent / "lib"
    flags = ["-shared", f"-L{lib}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    if kind == "cuda":
        flags += [f"-L{cuda_home()}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return flags


def module_flags(kind: str) -> tuple[str, ...]:
    """What module.cpp reports through `build_info`."""
    archs = ",".join(cuda_archs()) if kind == "cuda" else ""
    values = {"KIND": kind, "ARCHS": archs, "SOURCE_HASH": source_hash()}
    return tuple(f'-DEXL3_BUILD_{name}=\\"{value}\\"' for name, value in values.items())
