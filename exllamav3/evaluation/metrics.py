"""Metrics of one row of logits.

All in natural logarithms, from float32 log-softmax, summed in float64. `logits_TV` are
`(tokens, vocab)`; position t predicts token t + 1.

- negative log-likelihood of a row: the mean over t = 0 .. T-2 of -log p_t(token t+1);
  perplexity is exp of the mean over all predicted tokens of all rows.
- KL divergence of a result from its reference at position t: sum over v of
  p_t(v) (log p_t(v) - log q_t(v)), p the reference, q the result; every position counts, the last
  one too. Nats per token.
- top-1 agreement: the share of positions at which both have the same likeliest token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.errors import FormatError

CHUNK_TOKENS = 128
"""Positions worked on at a time, so that memory stays small beside the logits themselves."""


@dataclass(frozen=True, slots=True)
class RowMetrics:
    """Sums over one row, in nats; add them up over rows before dividing.

    predicted: positions that predict a token of the row. positions: all of them.
    kl, agreeing: None without a reference.
    """

    nll: float
    predicted: int
    positions: int
    kl: float | None = None
    agreeing: int | None = None


def score_row(logits_TV: Tensor, ids_T: Tensor) -> RowMetrics:
    """Negative log-likelihood of a row under its own logits.

    Args:
        logits_TV: `(tokens, vocab)`, any float dtype.
        ids_T: int64 `(tokens,)`.

    Raises:
        FormatError: the shapes do not fit, an id is beyond the logits, or a logit is not finite.
    """
    _check_logits("logits", logits_TV, ids_T)
    return RowMetrics(_nll(logits_TV, ids_T), len(ids_T) - 1, len(ids_T))


def compare_row(logits_TV: Tensor, reference_TV: Tensor, ids_T: Tensor) -> RowMetrics:
    """As `score_row`, and how far the logits are from those of a reference.

    Raises:
        FormatError: as `score_row`, for both; or the vocabularies differ.
    """
    _check_logits("logits", logits_TV, ids_T)
    _check_logits("reference logits", reference_TV, ids_T)
    if logits_TV.shape != reference_TV.shape:
        raise FormatError(
            f"evaluation: result and reference have vocabularies of {logits_TV.shape[1]} and "
            f"{reference_TV.shape[1]} tokens; compare models of one family"
        )
    kl, agreeing = 0.0, 0
    for start in range(0, len(ids_T), CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        reference, result = reference_TV[chunk].float(), logits_TV[chunk].float()
        agreeing += int((reference.argmax(-1) == result.argmax(-1)).sum())
        log_p, log_q = reference.log_softmax(-1), result.log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).double().sum())
    return RowMetrics(_nll(logits_TV, ids_T), len(ids_T) - 1, len(ids_T), kl, agreeing)


def _nll(logits_TV: Tensor, ids_T: Tensor) -> float:
    total = 0.0
    last = len(ids_T) - 1
    for start in range(0, last, CHUNK_TOKENS):
        stop = min(start + CHUNK_TOKENS, last)
        log_p = logits_TV[start:stop].float().log_softmax(-1)
        targets = ids_T[start + 1 : stop + 1].to(log_p.device)
        total -= float(log_p.gather(1, targets.unsqueeze(1)).double().sum())
    return total


def _check_logits(name: str, logits_TV: Tensor, ids_T: Tensor) -> None:
    if logits_TV.dim() != 2 or ids_T.dim() != 1 or len(logits_TV) != len(ids_T):
        raise FormatError(
            f"evaluation: {name} have shape {tuple(logits_TV.shape)} for ids of shape "
            f"{tuple(ids_T.shape)}, expected (tokens, vocab) for (tokens,)"
        )
    if int(ids_T.max()) >= logits_TV.shape[1]:
        raise FormatError(
            f"evaluation: token id {int(ids_T.max())} is beyond the {logits_TV.shape[1]} {name}; "
            f"tokenizer and model do not belong together"
        )
    if not bool(torch.isfinite(logits_TV).all()):
        raise FormatError(f"evaluation: {name} hold NaN or infinity; the model overflows")
