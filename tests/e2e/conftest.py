"""Fixtures of the conversion jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversion_support import stand_in_quantize, write_source


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantizer that is quick and right in everything but quality."""
    from exllamav3.conversion import pipeline

    monkeypatch.setattr(pipeline, "quantize_linear", stand_in_quantize)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny unquantized model."""
    return write_source(tmp_path_factory.mktemp("job") / "source")
