"""Steps of a sampler: each maps logits to logits, excluded tokens become minus infinity.

`logits_V` is float32 `(vocab,)`, `past_T` int64 holds the token ids of prompt and completion so
far. No step changes its input. A step built with its neutral value returns the logits as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exllamav3.errors import FormatError

EXCLUDED = -math.inf
LARGEST = 1e30
"""Bound of penalties and temperatures: products with logits and counts stay inside float32."""


class SamplingStep(Protocol):
    """One transformation of the logits."""

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        ...


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Make tokens that occurred less likely: positive logits / penalty, negative ones * penalty.

    penalty: 1 is neutral, must be positive. last_tokens: how far back to look, None for all.
    Source: Keskar et al. 2019 (CTRL), section 4.1, in the variant that is monotone for both signs.
    """

    penalty: float
    last_tokens: int | None = None

    def __post_init__(self) -> None:
        _check("RepetitionPenalty", "penalty", self.penalty, 0, LARGEST, open_low=True)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        seen = _window(past_T, self.last_tokens).unique()
        if self.penalty == 1 or seen.numel() == 0:
            return logits_V
        old = logits_V[seen]
        new = torch.where(old > 0, old / self.penalty, old * self.penalty)
        return logits_V.index_copy(0, seen, new)


@dataclass(frozen=True, slots=True)
class PresenceFrequencyPenalty:
    """Subtract `presence` once for a token that occurred, and `frequency` for each occurrence.

    0 is neutral; negative values encourage repetition. last_tokens as in RepetitionPenalty.
    """

    presence: float = 0.0
    frequency: float = 0.0
    last_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("presence", "frequency"):
            _check("PresenceFrequencyPenalty", name, getattr(self, name), -LARGEST, LARGEST)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        seen, counts = _window(past_T, self.last_tokens).unique(return_counts=True)
        if (self.presence == 0 and self.frequency == 0) or seen.numel() == 0:
            return logits_V
        penalty = self.presence + self.frequency * counts.to(logits_V.dtype)
        return logits_V.index_copy(0, seen, logits_V[seen] - penalty)


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide the logits: below 1 sharpens, above 1 flattens; 0 leaves only the likeliest token."""

    temperature: float

    def __post_init__(self) -> None:
        _check("Temperature", "temperature", self.temperature, 0, LARGEST)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        if self.temperature < 1 / LARGEST:  # the quotient would leave float32
            return TopK(1).apply(logits_V, past_T)
        return logits_V if self.temperature == 1 else logits_V / self.temperature


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the k likeliest tokens; 0 keeps all."""

    k: int

    def __post_init__(self) -> None:
        _check("TopK", "k", self.k, 0, math.inf)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        if self.k == 0 or self.k >= logits_V.numel():
            return logits_V
        values, ids = logits_V.topk(self.k)
        return torch.full_like(logits_V, EXCLUDED).index_copy(0, ids, values)


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all.

    Source: Holtzman et al. 2019, nucleus sampling.
    """

    p: float

    def __post_init__(self) -> None:
        _check("TopP", "p", self.p, 0, 1)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        if self.p == 1:
            return logits_V
        values, ids = logits_V.sort(descending=True, stable=True)
        probs = values.softmax(0)
        # A token stays while the mass before it is short of p; so the first one always does.
        keep = probs.cumsum(0) - probs < self.p
        keep[0] = True
        return torch.full_like(logits_V, EXCLUDED).index_copy(0, ids[keep], values[keep])


@dataclass(frozen=True, slots=True)
class MinP:
    """Keep tokens at least `p` times as likely as the likeliest; 0 keeps all."""

    p: float

    def __post_init__(self) -> None:
        _check("MinP", "p", self.p, 0, 1)

    def apply(self, logits_V: Tensor, past_T: Tensor) -> Tensor:
        """Return the transformed logits."""
        if self.p == 0:
            return logits_V
        return logits_V.masked_fill(logits_V < logits_V.max() + math.log(self.p), EXCLUDED)


def _window(past_T: Tensor, last_tokens: int | None) -> Tensor:
    return past_T if last_tokens is None else past_T[max(0, len(past_T) - last_tokens) :]


def _check(
    step: str, name: str, value: float, low: float, high: float, open_low: bool = False
) -> None:
    if not (low < value if open_low else low <= value) or not value <= high:
        bracket = "(" if open_low else "["
        raise FormatError(
            f"{step}: {name} is {value!r}, expected a number in {bracket}{low}, {high}]"
        )
