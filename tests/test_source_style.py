"""What no formatter of this project checks: native lines and the lengths of files."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NATIVE = ("*.cpp", "*.h", "*.cu", "*.cuh")
MAX_CHARACTERS = 100
MAX_LINES = {"*.py": 300, "*.cpp": 400, "*.h": 400, "*.cu": 500, "*.cuh": 500}
"""As docs/architecture.md says."""


def sources(pattern: str) -> list[Path]:
    folders = ("exllamav3", "exllamav3_ext", "conversion", "tests")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob(pattern))


@pytest.mark.parametrize("pattern", NATIVE)
def test_no_native_line_is_longer_than_100_characters(pattern):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} characters"
        for path in sources(pattern)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_CHARACTERS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("pattern", "limit"), MAX_LINES.items())
def test_no_file_is_longer_than_one_concept(pattern, limit):
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in sources(pattern)}
    found = [f"{p.relative_to(ROOT)}: {n} lines" for p, n in lengths.items() if n > limit]
    assert not found, f"more than {limit} lines:\n" + "\n".join(found)
