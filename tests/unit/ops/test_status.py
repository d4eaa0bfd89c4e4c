"""What the library says about its native code, with and without it."""

import os
import subprocess
import sys

import pytest
import torch

import exllamav3_ext
from exllamav3.errors import UnsupportedError
from exllamav3.model.devices import resolve_device
from exllamav3.ops import status


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_build_info_names_what_serves_the_operators():
    info = status.build_info()
    assert info["torch"] == torch.__version__
    if info["native"]:
        assert info["kind"] in ("cpu", "cuda")
        assert info["isa"] in ("portable", "avx2", "avx512")
    else:
        assert info["reason"] == exllamav3_ext.native_missing_reason


def test_without_native_code_one_line_says_that_it_is_slow_and_why():
    result = run_python(
        "import exllamav3_ext; print(exllamav3_ext.build_info()['native'])",
        EXLLAMAV3_BUILD="none",
    )
    assert result.stdout.strip() == "False"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "slow" in lines[0]
    assert "EXLLAMAV3_BUILD=none" in lines[0]


def test_a_cuda_device_is_refused_with_the_reason_when_the_build_has_no_cuda_kernels(monkeypatch):
    monkeypatch.setattr(exllamav3_ext, "native_missing_reason", None)
    monkeypatch.setattr(status, "build_info", lambda: {"native": True, "kind": "cpu", "archs": []})
    for cuda, reason in (("13.0", "built without CUDA kernels"), (None, "build without CUDA. Ins")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        status.require_device.cache_clear()
        with pytest.raises(UnsupportedError, match=reason):
            status.require_device(torch.device("cuda:0"))
    status.require_device.cache_clear()


@pytest.mark.parametrize(("gpus", "device"), [(0, "cuda"), (0, "cuda:0"), (2, "cuda:2")])
@pytest.mark.parametrize("reason", [None, "EXLLAMAV3_BUILD=none"])
def test_a_gpu_that_is_not_there_is_refused_by_name(monkeypatch, gpus, device, reason):
    info = {"native": not reason, "kind": "cuda", "archs": ["90a"]}
    monkeypatch.setattr(exllamav3_ext, "native_missing_reason", reason)
    monkeypatch.setattr(status, "build_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    status.require_device.cache_clear()
    there = ", ".join(f"cuda:{n}" for n in range(gpus)) or "none"
    with pytest.raises(UnsupportedError, match=f"{device} does not exist here.*sees: {there}"):
        resolve_device(device)
    status.require_device.cache_clear()


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("80", (8, 0), True),
        ("80", (8, 6), True),
        ("86", (8, 0), False),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("120", (12, 0), True),
    ],
)
def test_machine_code_runs_on_its_major_version_from_its_minor_version_up(arch, capability, runs):
    assert status._runs_on(arch, *capability) is runs


def test_an_unknown_build_kind_is_refused():
    result = run_python("import exllamav3_ext", EXLLAMAV3_BUILD="gpu")
    assert result.returncode != 0
    assert "EXLLAMAV3_BUILD is 'gpu', expected one of auto, cpu, cuda, none" in result.stderr
