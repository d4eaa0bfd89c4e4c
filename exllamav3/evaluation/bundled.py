"""The bundled evaluation text. Its sources and terms: README.md beside it."""

from __future__ import annotations

from pathlib import Path

_PLACES = (
    Path(__file__).parent / "text",  # an installed package
    Path(__file__).parents[2] / "examples" / "text",  # a checkout; pyproject.toml maps it
)


def bundled_text() -> Path:
    """Path of the text that `exllamav3 eval` measures on by default."""
    files = [place / "evaluation.txt" for place in _PLACES]
    return next((file for file in files if file.is_file()), files[0])
