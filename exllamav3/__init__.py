"""EXL3 trellis quantization for PyTorch with a QKV topology per attention block.

The public names are loaded on first use, so that `exllamav3.errors` and
`exllamav3.topology` import without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "exllamav3.model.config",
    "Model": "exllamav3.model.model",
    "Cache": "exllamav3.cache.cache",
    "Tokenizer": "exllamav3.tokenizer.tokenizer",
    "Generator": "exllamav3.generator.generator",
    "Job": "exllamav3.generator.job",
}

__all__ = ["Cache", "Config", "Generator", "Job", "Model", "Tokenizer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'exllamav3' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
