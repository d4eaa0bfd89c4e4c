"""Token embedding."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.module import Module, TensorSource, read_weight


class Embedding(Module):
    """Token ids `(b, s)` to the float32 residual stream `(b, s, hidden)`.

    The table `<key>.weight` `(vocab, hidden)` stays in its stored dtype: only the rows that are
    looked up are converted.
    """

    def __init__(self, key: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__(key)
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.weight: Tensor | None = None

    def own_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Its table."""
        return (f"{self.key}.weight",)

    def load_own(self, source: TensorSource) -> None:
        """Read the table."""
        weight, _ = read_weight(
            source, f"{self.key}.weight", (self.vocab_size, self.hidden_size), "embedding"
        )
        self.weight = weight.to(self.device)

    def own_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """Those of the table as it is stored."""
        stored = source.describe(f"{self.key}.weight").dtype
        return self.vocab_size * self.hidden_size * (4 if stored == "F32" else 2)

    def unload_own(self) -> None:
        """Drop the table."""
        self.weight = None

    def get_tensors(self) -> dict[str, Tensor]:
        """The table as it was stored."""
        assert self.weight is not None
        return {f"{self.key}.weight": self.weight}

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """Look up `x`, integer `(b, s)`; ids must be inside the vocabulary."""
        assert self.weight is not None
        return F.embedding(x.to(self.weight.device), self.weight).to(torch.float32)
