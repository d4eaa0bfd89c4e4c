"""How the native code is built: a small ninja driver over the list in `_build.py`.

Compilers are driven directly, not through `torch.utils.cpp_extension`, because that one
refuses nvcc under a CPU build of torch, while the stable ABI lets one `.so` with CPU and
CUDA kernels be compiled there and loaded anywhere.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Relative, because setup.py imports these two files without their package.
from ._build import (
    CSRC,
    EXTENSION_NAME,
    BuildError,
    cxx_flags,
    detect,
    find_nvcc,
    link_flags,
    module_flags,
    nvcc_flags,
    source_hash,
    sources,
)


def ninja_file(kind: str, target: Path) -> str:
    """Text of build.ninja: one edge for each source, one link."""
    compiler = find_compiler()
    cxx, nvcc, link = cxx_flags(kind), nvcc_flags() if kind == "cuda" else [], link_flags(kind)
    lines = [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {compiler} -MMD -MF $out.d {_join(cxx)} $extra -c $in -o $out",
        "  description = c++ $name",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule nvcc",
        f"  command = {find_nvcc()} -MMD -MF $out.d {_join(nvcc)} $extra -c $in -o $out",
        "  description = nvcc $name",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {compiler} $in {_join(link)} -o $out",
        "  description = link $out",
    ]
    objects = []
    for source in sources(kind):
        obj = source.path.replace("/", ".") + ".o"
        flags = list(source.flags)
        if source.path == "module.cpp":
            flags += module_flags(kind)
        rule = "nvcc" if source.path.endswith(".cu") else "cxx"
        lines += [f"build {obj}: {rule} {_escape(str(CSRC / source.path))}"]
        lines += [f"  name = {source.path}", f"  extra = {' '.join(flags)}"]
        objects.append(obj)
    lines += [f"build {_escape(str(target))}: link {' '.join(objects)}", ""]
    return "\n".join(lines)


def build(kind: str, build_dir: Path, target: Path) -> None:
    """Compile and link `target`; work that is up to date is not repeated.

    Args:
        kind: "cpu" or "cuda".
        build_dir: objects, build.ninja and a lock file; created.
        target: path of the shared object; its folder is created.

    Raises:
        BuildError: a tool is missing or a compiler failed (its output has been shown).
    """
    _check_toolchain()
    build_dir.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(build_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the system even if this process is killed
        text = ninja_file(kind, target.resolve())
        path = build_dir / "build.ninja"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        jobs = os.environ.get("MAX_JOBS") or str(min(os.cpu_count() or 1, 8))
        command = [_find_ninja(), "-C", str(build_dir), "-j", jobs]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise BuildError(
                f"the compiler failed; its message is above. To see the commands: "
                f"{' '.join(command)} -v. To go without native code: EXLLAMAV3_BUILD=none."
            )


def jit_directory(kind: str) -> Path:
    """Cache folder of a just-in-time build, keyed by sources, torch and flags."""
    import torch

    key = json.dumps([source_hash(), torch.__version__, cxx_flags(kind), link_flags(kind)])
    if kind == "cuda":
        key += json.dumps(nvcc_flags())
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "exllamav3" / hashlib.sha256(key.encode()).hexdigest()[:16]


def find_compiler() -> str:
    """The C++ compiler: CXX, or the first of g++, c++ and clang++ on PATH."""
    asked = os.environ.get("CXX")
    for compiler in [asked] if asked else ["g++", "c++", "clang++"]:
        if shutil.which(compiler.split()[0]) is not None:
            return compiler
    raise BuildError(
        f"no C++ compiler: {asked or 'g++'!r} was not found. Install g++ (12 or newer) or set CXX; "
        f"EXLLAMAV3_BUILD=none installs without native code, which is very slow."
    )


def _check_toolchain() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise BuildError(
            "this is a free-threaded Python, which has no limited API; "
            "use a regular build of Python, or EXLLAMAV3_BUILD=none"
        )
    find_compiler()
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise BuildError(f"{header} is missing: install the Python headers (python3-dev)")


def _find_ninja() -> str:
    beside = Path(sys.executable).parent / "ninja"
    found = str(beside) if beside.exists() else shutil.which("ninja")
    if found is None:
        raise BuildError("ninja was not found: pip install ninja")
    return found


def _join(flags: list[str]) -> str:
    return " ".join(flags)


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def main() -> int:
    """`python -m exllamav3_ext._driver`: build somewhere else than beside the package."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--archs", help='compute capabilities, e.g. "80;90a"')
    parser.add_argument("--out", type=Path, required=True, help="folder for objects and result")
    parser.add_argument("--check", action="store_true", help="load the result in a new process")
    args = parser.parse_args()
    if args.archs:
        os.environ["EXLLAMAV3_CUDA_ARCHS"] = args.archs
    try:
        target = args.out / EXTENSION_NAME
        build(args.kind or detect(), args.out, target)
    except BuildError as error:
        print(f"exllamav3: {error}", file=sys.stderr)
        return 1
    print(f"built {target} ({target.stat().st_size / 1e6:.1f} MB)")
    if args.check:
        load = (
            "import sys, torch; from exllamav3_ext import schema; "
            "torch.ops.load_library(sys.argv[1]); print(torch.ops.exllamav3.build_info())"
        )
        command = [sys.executable, "-c", load, str(target)]
        return subprocess.run(command, env={**os.environ, "EXLLAMAV3_BUILD": "none"}).returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
