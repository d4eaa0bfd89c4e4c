"""Samplers: how the next token is chosen from the logits.

A sampler is a stack of steps (`sampling_steps`) and a choice at the end: the likeliest token, or
a draw. A draw needs one uniform number from the job's own generator on the CPU, so a seed gives
the same tokens whatever else runs in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.generator.sampling_steps import (
    MinP,
    PresenceFrequencyPenalty,
    RepetitionPenalty,
    SamplingStep,
    Temperature,
    TopK,
    TopP,
)


class Sampler:
    """Applies steps in order, then chooses.

    Args:
        steps: transformations of the logits.
        greedy: choose the likeliest token instead of drawing one.
    """

    def __init__(self, steps: Sequence[SamplingStep] = (), greedy: bool = False) -> None:
        self.steps = tuple(steps)
        self.greedy = greedy

    def sample(self, logits_V: Tensor, past_T: Tensor, generator: torch.Generator) -> int:
        """Choose a token id.

        Args:
            logits_V: `(vocab,)`, any float dtype and device.
            past_T: int64 ids of prompt and completion so far, any device.
            generator: on the CPU; a draw takes one number from it, a greedy choice none.

        Raises:
            FormatError: the logits hold NaN, or the steps exclude every token.
        """
        logits_V = logits_V.float()
        past_T = past_T.to(logits_V.device)
        for step in self.steps:
            logits_V = step.apply(logits_V, past_T)
        peak = logits_V.max()
        if not bool(peak.isfinite()):  # max of anything with NaN is NaN
            raise FormatError(
                f"sampler: the largest logit is {float(peak)}; the model produced NaN or infinity, "
                f"or the sampling steps exclude every token"
            )
        if self.greedy:
            return int(logits_V.argmax())
        return _draw(logits_V, generator)


def _draw(logits_V: Tensor, generator: torch.Generator) -> int:
    """Invert the cumulative distribution in float64 at one uniform number."""
    cumulative = logits_V.double().softmax(0).cumsum(0)
    uniform = torch.rand((), dtype=torch.float64, generator=generator).to(cumulative.device)
    # right=True: a token of probability 0 has the same cumulative value as its predecessor and is
    # passed over. The factor < 1 keeps the point below the last value, whatever it rounded to.
    point = uniform * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    return min(index, int((logits_V > float("-inf")).nonzero()[-1]))


class GreedySampler(Sampler):
    """Always the likeliest token."""

    def __init__(self) -> None:
        super().__init__(greedy=True)


ArgmaxSampler = GreedySampler


class CategoricalSampler(Sampler):
    """Draw from the whole distribution at a temperature."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__([Temperature(temperature)])


class DefaultSampler(Sampler):
    """Min-p 0.08, then temperature 0.8."""

    def __init__(self) -> None:
        super().__init__([MinP(0.08), Temperature(0.8)])


class TopKSampler(Sampler):
    """Draw among the k likeliest tokens."""

    def __init__(self, top_k: int, temperature: float = 1.0) -> None:
        super().__init__([TopK(top_k), Temperature(temperature)])


class TopPSampler(Sampler):
    """Draw from the nucleus of probability p."""

    def __init__(self, top_p: float, temperature: float = 1.0, temperature_last: bool = False):
        steps: list[SamplingStep] = [Temperature(temperature), TopP(top_p)]
        super().__init__(steps[::-1] if temperature_last else steps)


class ComboSampler(Sampler):
    """The usual combination; every parameter has a neutral default.

    Order: repetition, presence and frequency penalties, temperature, min-p, top-k, top-p. With
    `temperature_last` the filters see the distribution at temperature 1. Temperature 0 is greedy.

    Args:
        temperature: 1 is neutral.
        min_p, top_k, top_p: filters; 0, 0 and 1 are neutral.
        rep_p: repetition penalty, 1 is neutral.
        pres_p, freq_p: presence and frequency penalty, 0 is neutral.
        penalty_range: how many of the latest tokens the penalties see, None for all.
        temperature_last: apply the temperature after the filters.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        *,
        rep_p: float = 1.0,
        pres_p: float = 0.0,
        freq_p: float = 0.0,
        penalty_range: int | None = None,
        temperature_last: bool = False,
    ) -> None:
        penalties: list[SamplingStep] = [
            RepetitionPenalty(rep_p, penalty_range),
            PresenceFrequencyPenalty(pres_p, freq_p, penalty_range),
        ]
        filters: list[SamplingStep] = [MinP(min_p), TopK(top_k), TopP(top_p)]
        heat = Temperature(temperature)
        ordered = [*filters, heat] if temperature_last else [heat, *filters]
        super().__init__([*penalties, *ordered], greedy=temperature == 0)


class CustomSampler(Sampler):
    """Your own stack of steps, drawn from at the end unless `greedy`."""
