"""The compiled module needs only the stable ABI of torch and the limited API of CPython."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import exllamav3_ext

MODULE = Path(exllamav3_ext.__file__).parent / "_C.abi3.so"

pytestmark = pytest.mark.skipif(
    not MODULE.exists() or shutil.which("nm") is None, reason="needs a built _C and binutils"
)


@pytest.fixture(scope="module")
def undefined() -> list[str]:
    output = subprocess.run(
        ["nm", "-D", "-u", "-C", str(MODULE)], capture_output=True, text=True, check=True
    ).stdout
    return [line.split(maxsplit=1)[1] for line in output.splitlines()]


def test_no_symbol_of_the_unstable_torch_interfaces_is_needed(undefined):
    unstable = [name for name in undefined if re.search(r"\b(at|c10|torch|caffe2)::", name)]
    assert unstable == []


def test_torch_is_reached_through_its_c_shims_alone(undefined):
    names = [name.split("@")[0] for name in undefined]
    system = re.compile(
        r"^(std::|operator |vtable for (std::|__cxxabiv1)|typeinfo for (std::|__cxxabiv1)|VTT for"
        r"|__|_ITM_|_Unwind_|Py|aoti_torch_|torch_)"
    )
    libc = {name.split("@")[0] for name in undefined if "@GLIBC" in name}
    others = [name for name in names if not system.match(name) and name not in libc]
    assert others == []


def test_every_python_symbol_is_in_the_limited_api(undefined):
    python = {name.split("@")[0] for name in undefined if name.startswith(("Py", "_Py"))}
    assert python <= {"PyModule_Create2"}


def test_a_cuda_stream_is_only_a_weak_reference():
    """A strong one would make the file unloadable under a CPU build of torch."""
    output = subprocess.run(
        ["nm", "-D", str(MODULE)], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in output.splitlines() if "cuda_stream" in line]
    assert all(line[0] == "w" for line in lines)


def test_loading_it_does_not_change_the_floating_point_mode_of_the_process():
    """-ffast-math at link time would flush denormals everywhere."""
    import torch

    assert (torch.tensor(1e-40) * 1.0).item() != 0.0
    assert float("1e-310") * 1.0 != 0.0
