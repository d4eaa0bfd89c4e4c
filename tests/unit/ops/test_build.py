"""Building and loading the extension: choices, refusals, staleness."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import exllamav3_ext
from exllamav3_ext import _build, _driver

ROOT = Path(__file__).parents[3]


@pytest.fixture
def no_cuda_toolkit(monkeypatch):
    monkeypatch.setattr(_build, "cuda_home", lambda: None)


def test_every_source_exists_and_every_kernel_file_is_listed():
    listed = {source.path for source in (*_build.CPU_SOURCES, *_build.CUDA_SOURCES)}
    files = {str(p.relative_to(_build.CSRC)) for p in _build.CSRC.rglob("*.c*") if p.is_file()}
    sources = {name for name in files if name.endswith((".cpp", ".cu"))}
    assert listed == sources


def test_a_cuda_build_without_nvcc_is_refused(monkeypatch, no_cuda_toolkit):
    monkeypatch.setenv("EXLLAMAV3_BUILD", "cuda")
    with pytest.raises(_build.BuildError, match="no CUDA toolkit"):
        _build.detect()


def test_cuda_torch_without_nvcc_builds_the_cpu_kernels(monkeypatch, no_cuda_toolkit):
    monkeypatch.delenv("EXLLAMAV3_BUILD", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert _build.detect() == "cpu"


def test_cuda_torch_with_nvcc_builds_both(monkeypatch):
    monkeypatch.delenv("EXLLAMAV3_BUILD", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr(_build, "find_nvcc", lambda: "/usr/bin/nvcc")
    assert _build.detect() == "cuda"


@pytest.mark.parametrize(
    ("value", "archs"), [("90a", ("90a",)), ("80;86, 90a", ("80", "86", "90a"))]
)
def test_architectures_are_an_option(monkeypatch, value, archs):
    monkeypatch.setenv("EXLLAMAV3_CUDA_ARCHS", value)
    assert _build.cuda_archs() == archs


def test_a_malformed_architecture_is_refused(monkeypatch):
    monkeypatch.setenv("EXLLAMAV3_CUDA_ARCHS", "8.0")
    with pytest.raises(_build.BuildError, match=r"EXLLAMAV3_CUDA_ARCHS holds '8\.0'"):
        _build.cuda_archs()


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(_build.BuildError, match="'no-such-compiler' was not found"):
        _driver.build("cpu", tmp_path / "build", tmp_path / "_C.abi3.so")


@pytest.mark.parametrize("flag", ["-march=native", "-Ofast", "-ffast-math"])
def test_no_flag_ties_the_build_to_this_machine_or_breaks_arithmetic(flag):
    assert flag not in _driver.ninja_file("cpu", Path("_C.abi3.so"))


def test_fused_multiply_adds_are_never_the_compilers_idea():
    assert "-ffp-contract=off" in _build.cxx_flags("cpu")


def run_setup(tmp_path: Path, *, torch: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    blocker = tmp_path / "torch.py"
    blocker.write_text(torch)
    code = "import runpy, sys; sys.argv = ['setup.py', 'build_ext']; "
    code += "runpy.run_path('setup.py', run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), **env},
        capture_output=True,
        text=True,
    )


def test_without_torch_setup_stops_and_says_what_to_do(tmp_path):
    result = run_setup(
        tmp_path, torch="raise ImportError('no torch')", env={"EXLLAMAV3_BUILD": "auto"}
    )
    assert result.returncode == 1
    assert "torch is not installed" in result.stderr
    assert "pip install --no-build-isolation" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_module_that_does_not_load_is_an_error_and_no_fallback(tmp_path):
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"not a shared object")
    with pytest.raises(ImportError, match="exists but does not load under torch"):
        exllamav3_ext._load_file(broken)


def test_the_library_turns_a_failed_load_into_an_extension_error(tmp_path):
    package = tmp_path / "exllamav3_ext"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('_C exists but does not load')")
    code = (
        "from exllamav3.errors import ExtensionError\n"
        "try:\n    import exllamav3.ops\n"
        "except ExtensionError as error:\n    print('ExtensionError:', error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "ExtensionError: _C exists but does not load", result.stderr


def test_a_change_of_any_source_is_noticed(monkeypatch, tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "a.h").write_text("1")
    monkeypatch.setattr(_build, "CSRC", tmp_path)
    before = _build.source_hash()
    (tmp_path / "cpu" / "a.h").write_text("2")
    assert _build.source_hash() != before


@pytest.mark.slow
def test_building_just_in_time_works_and_is_cached(tmp_path):
    code = "import exllamav3_ext; print(exllamav3_ext.build_info()['native'])"
    copy = tmp_path / "exllamav3_ext"
    subprocess.run(["cp", "-r", str(ROOT / "exllamav3_ext"), str(copy)], check=True)
    (copy / "_C.abi3.so").unlink(missing_ok=True)
    env = {
        **os.environ,
        "EXLLAMAV3_JIT": "1",
        "EXLLAMAV3_BUILD": "cpu",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path),
    }
    for expected in ("[1/", "no work to do"):
        result = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert result.stdout.strip() == "True", result.stderr
        assert expected in result.stderr
