"""`Job`: one prompt to be continued, and the records that a generator reports about it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.generator.sampler import DefaultSampler, Sampler
from exllamav3.generator.stop import split_stop_conditions

EosReason = Literal["stop_token", "stop_string", "max_new_tokens"]


class Result(TypedDict, total=False):
    """What `Generator.iterate` reports; the keys present depend on the stage.

    Always: `job`, `serial`, `identifier`, `stage`, `eos`.
    stage "started": nothing else.
    stage "prefill": `curr_progress` of `max_progress` prompt tokens are processed.
    stage "streaming": `text`, the text that became certain (may be empty), and `token_ids`, int64
        `(1, n)`, the ids chosen in this step. The texts of a job joined are `full_completion`.
    With `eos`: `eos_reason`; `eos_triggering_token_id` or `eos_triggering_string`;
        `full_completion`, the text without the stop token or string; `prompt_tokens`;
        `new_tokens`, all the tokens chosen; `time_enqueued`, `time_prefill` and `time_generate`,
        seconds spent waiting, on the prompt, and on the completion.
    """

    job: Job
    serial: int
    identifier: Any
    stage: Literal["started", "prefill", "streaming"]
    eos: bool
    curr_progress: int
    max_progress: int
    text: str
    token_ids: Tensor
    eos_reason: EosReason
    eos_triggering_token_id: int
    eos_triggering_string: str
    full_completion: str
    prompt_tokens: int
    new_tokens: int
    time_enqueued: float
    time_prefill: float
    time_generate: float


class Job:
    """A request to continue one prompt.

    Args:
        input_ids: prompt, int64 `(tokens,)` or `(1, tokens)`, or a list of ids; at least one.
        max_new_tokens: at most this many tokens; None for as many as fit.
        min_new_tokens: stop tokens cannot be chosen before this many; stop strings can.
        sampler: default `DefaultSampler()`.
        stop_conditions: strings and token ids that end the completion. The model's own EOS ids are
            added unless `ignore_eos`.
        ignore_eos: generate on past EOS.
        seed: of the draws, of which the low 32 bits count; None picks one, which `job.seed`
            then tells.
        identifier: anything; comes back in the results.
        decode_special_tokens: spell special tokens out in the text.

    Attributes:
        serial: number given by the generator when it is enqueued, None before.

    Raises:
        FormatError: an argument is outside its domain.
    """

    def __init__(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int = 0,
        sampler: Sampler | None = None,
        stop_conditions: Sequence[str | int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        identifier: Any = None,
        decode_special_tokens: bool = False,
    ) -> None:
        self.prompt_ids = _prompt_ids(input_ids)
        if max_new_tokens is not None and not _is_count(max_new_tokens, 1):
            raise FormatError(
                f"Job: max_new_tokens is {max_new_tokens!r}, expected a whole number of at least 1"
            )
        if not _is_count(min_new_tokens, 0) or min_new_tokens > (max_new_tokens or min_new_tokens):
            raise FormatError(
                f"Job: min_new_tokens is {min_new_tokens!r}, expected a whole number from 0 to "
                f"max_new_tokens ({max_new_tokens})"
            )
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise FormatError(f"Job: seed is {seed!r}, expected a whole number or None")
        self.max_new_tokens = max_new_tokens
        self.min_new_tokens = min_new_tokens
        self.sampler = sampler or DefaultSampler()
        self.stop_strings, self.stop_ids = split_stop_conditions(stop_conditions)
        self.ignore_eos = ignore_eos
        self.seed = secrets.randbits(32) if seed is None else seed
        self.identifier = identifier
        self.decode_special_tokens = decode_special_tokens
        self.serial: int | None = None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _prompt_ids(input_ids: Tensor | Sequence[int]) -> list[int]:
    if isinstance(input_ids, Tensor):
        is_row = input_ids.dim() == 1 or (input_ids.dim() == 2 and input_ids.shape[0] == 1)
        if not is_row or input_ids.dtype not in (torch.int64, torch.int32):
            raise FormatError(
                f"Job: input_ids is {input_ids.dtype} of shape {tuple(input_ids.shape)}, expected "
                f"int64 (tokens,) or (1, tokens); make one job for each prompt"
            )
    ids = input_ids.flatten().tolist() if isinstance(input_ids, Tensor) else list(input_ids)
    if not ids:
        raise FormatError(
            "Job: the prompt has no tokens; give it text, or add_bos=True if the model has a BOS"
        )
    return ids
