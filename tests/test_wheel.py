"""A wheel carries what its commands need by default; building one needs no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = {
    "exllamav3": "exllamav3",
    "exllamav3_ext": "exllamav3_ext",
    "conversion": "exllamav3/conversion",
    "examples/text": "exllamav3/evaluation/text",
}
"""Folders of the repository, and where their files are in a wheel."""
GENERATED = ("__pycache__", "*.pyc", "*.so", "*.egg-info", ".ninja_*")


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what a wheel is made from: builds leave files behind, which the next one packs."""
    tree = tmp_path_factory.mktemp("tree") / "repository"
    for folder in PLACES:
        ignored = shutil.ignore_patterns(*GENERATED)
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def installed(tree, tmp_path_factory) -> Path:
    """The contents of the wheel."""
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
            "--no-index", "-w", str(out), str(tree),
        ],
        env=os.environ | {"EXLLAMAV3_BUILD": "none"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(out / "site")
    return out / "site"


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("folder", "place"), PLACES.items())
def test_every_file_of_a_package_is_in_the_wheel(tree, installed, folder, place):
    assert files(tree / folder) - files(installed / place) == set()


def test_the_commands_of_a_wheel_find_their_texts(installed, example_model, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": str(installed)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    where = run(
        "-c",
        "from exllamav3.conversion.calibration import BUNDLED_TEXT as one\n"
        "from exllamav3.evaluation.bundled import bundled_text\n"
        "print(one, one.is_file()); print(bundled_text(), bundled_text().is_file())",
    )
    assert where.stdout.splitlines() == [
        f"{installed}/exllamav3/conversion/data/calibration.txt True",
        f"{installed}/exllamav3/evaluation/text/evaluation.txt True",
    ], where.stderr
    done = run("-m", "exllamav3", "eval", str(example_model), "--rows=1", "--cols=16")
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
