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
    "ArgmaxSampler": "exllamav3.generator.sampler",
    "CategoricalSampler": "exllamav3.generator.sampler",
    "ComboSampler": "exllamav3.generator.sampler",
    "CustomSampler": "exllamav3.generator.sampler",
    "DefaultSampler": "exllamav3.generator.sampler",
    "GreedySampler": "exllamav3.generator.sampler",
    "TopKSampler": "exllamav3.generator.sampler",
    "TopPSampler": "exllamav3.generator.sampler",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'exllamav3' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
