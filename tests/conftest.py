"""Fixtures of the whole suite.

EXL3_FAIL_ON_SKIP=1 turns every skip into a failure, so that a CI lane cannot stay
green by skipping. Tests marked `slow` or `cuda` are deselected unless asked for. Tests
marked `two_gpus` skip on a machine with one, and that is no failure anywhere: the number of
GPUs is no choice of a lane.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The matrices of the tests are tiny: a second thread costs more than it brings, and a great deal
# more on a busy machine. Set before torch is imported; tests of threading choose their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of stored test data."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def example_model() -> Path:
    """Folder of the trained example model, unquantized."""
    return Path(__file__).parent.parent / "examples" / "tiny-qwen35-lm"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Device to test on; its `cuda` variant runs only under `-m cuda`."""
    return request.param


@pytest.fixture(autouse=True)
def _thread_count_is_restored() -> Iterator[None]:
    """A test that changes the number of threads does not slow down the ones after it."""
    torch = sys.modules.get("torch")  # topology tests run without torch
    before = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    if item.get_closest_marker("two_gpus") is None:
        return
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} found")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Make a skip a failure when asked to."""
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("two_gpus") is not None
    if report.skipped and not expected and os.environ.get("EXL3_FAIL_ON_SKIP") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped under EXL3_FAIL_ON_SKIP=1: {report.longrepr}"
    return report
