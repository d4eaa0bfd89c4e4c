"""Jobs without a QKV topology plan: nothing of the package runs."""

from __future__ import annotations

import sys
import types

import pytest
from conversion_support import (
    folder_bytes,
    job_options,
)
from exllamav3.conversion import convert
from plan_support import KEY

from exllamav3.checkpoint.tensor_files import TensorFiles

pytestmark = pytest.mark.usefixtures("stand_in")


def topology_functions() -> list[tuple[types.ModuleType, str]]:
    """Every place of the library where a function of the topology package is bound."""
    return [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("exllamav3")
        for name, value in list(vars(module).items())
        if isinstance(value, types.FunctionType)
        and value.__module__.startswith("exllamav3.topology")
    ]


@pytest.mark.parametrize("codebook", ["mul1", "3inst"])
def test_without_a_plan_no_function_of_the_topology_package_runs(
    source, tmp_path, monkeypatch, codebook
):
    expected = convert(job_options(source, tmp_path / "before", codebook=codebook)).out_dir

    def forbidden(*arguments, **named):
        raise AssertionError("the topology package ran in a job without a plan")

    places = topology_functions()
    assert len(places) > 20
    for module, name in places:
        monkeypatch.setattr(module, name, forbidden)
    out = convert(job_options(source, tmp_path / "after", codebook=codebook)).out_dir
    assert folder_bytes(out) == folder_bytes(expected)


def test_without_a_plan_no_key_of_it_is_written(source, tmp_path):
    out = convert(job_options(source, tmp_path)).out_dir
    assert not any(KEY.encode() in content for content in folder_bytes(out).values())


def test_3inst_linears_carry_no_marker(source, tmp_path):
    names = TensorFiles(convert(job_options(source, tmp_path, codebook="3inst")).out_dir).names()
    assert not any(name.endswith((".mul1", ".mcg")) for name in names)
