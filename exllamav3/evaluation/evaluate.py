"""Run a model, and perhaps its reference, over rows of tokens and sum the metrics up.

One row at a time, so memory is that of one row's logits whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from exllamav3.evaluation.metrics import RowMetrics, compare_row, score_row


class HasForward(Protocol):
    """What is needed of a model: logits `(1, tokens, vocab)` of ids `(1, tokens)`, uncached."""

    def forward(self, ids: Tensor, params: Mapping[str, Any]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured; formulas in `metrics`.

    rows, cols: of the token table. perplexity: of the model; reference_perplexity, kl (nats per
    token, reference || model) and top1_agreement (0 to 1): None without a reference.
    """

    rows: int
    cols: int
    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None


@torch.inference_mode()
def evaluate(
    model: HasForward,
    ids_RT: Tensor,
    reference: HasForward | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Measure a model on rows of tokens.

    Args:
        model: loaded model to be measured.
        ids_RT: int64 `(rows, tokens)`, from `token_rows`.
        reference: loaded model with the same vocabulary that it is compared with.
        progress: called with the number of finished rows.

    Raises:
        FormatError: a model yields logits that are not finite, or the vocabularies differ.
    """
    results: list[RowMetrics] = []
    references: list[RowMetrics] = []
    for index, ids_T in enumerate(ids_RT):
        logits_TV = model.forward(ids_T.unsqueeze(0), {})[0]
        if reference is None:
            results.append(score_row(logits_TV, ids_T))
        else:
            reference_TV = reference.forward(ids_T.unsqueeze(0), {})[0].to(logits_TV.device)
            results.append(compare_row(logits_TV, reference_TV, ids_T))
            references.append(score_row(reference_TV, ids_T))
        if progress is not None:
            progress(index + 1)
    rows, cols = ids_RT.shape
    if reference is None:
        return Evaluation(rows, cols, _perplexity(results))
    positions = sum(r.positions for r in results)
    return Evaluation(
        rows,
        cols,
        _perplexity(results),
        _perplexity(references),
        sum(r.kl or 0.0 for r in results) / positions,
        sum(r.agreeing or 0 for r in results) / positions,
    )


def _perplexity(rows: list[RowMetrics]) -> float:
    mean = sum(r.nll for r in rows) / sum(r.predicted for r in rows)
    return float(torch.tensor(mean, dtype=torch.float64).exp())  # inf where math.exp would raise
