"""A job while it runs: its place in the cache, its tokens, its text."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from exllamav3.cache import Sequence
from exllamav3.generator.job import Job, Result
from exllamav3.generator.stop import StopFilter, StopMatch
from exllamav3.tokenizer import Tokenizer

GROW_TOKENS = 256


class ActiveJob:
    """State of one running job.

    Args:
        job: the request.
        serial: its number.
        sequence: its reservation in the cache, for prompt and completion.
        max_new_tokens: the limit in force.
        tokenizer: turns ids into text and knows the EOS ids.
        enqueued_at: `perf_counter` of when it was enqueued.
    """

    def __init__(
        self,
        job: Job,
        serial: int,
        sequence: Sequence,
        max_new_tokens: int,
        tokenizer: Tokenizer,
        enqueued_at: float,
    ) -> None:
        self.job = job
        self.serial = serial
        self.sequence = sequence
        self.max_new_tokens = max_new_tokens
        self._stop_ids = job.stop_ids | (set() if job.ignore_eos else set(tokenizer.eos_token_ids))
        self._stream = tokenizer.stream(job.prompt_ids, job.decode_special_tokens)
        self._stop_filter = StopFilter(job.stop_strings)
        self._random = torch.Generator().manual_seed(job.seed % 2**32)
        self._text: list[str] = []
        self._count = len(job.prompt_ids)
        self._ids_T = torch.tensor(job.prompt_ids)
        self._enqueued_at, self._started_at = enqueued_at, perf_counter()
        self._prefilled_at = self._started_at

    @property
    def is_prefilling(self) -> bool:
        """Whether no token has been chosen yet."""
        return self._count == len(self.job.prompt_ids)

    def next_ids(self, max_tokens: int) -> Tensor:
        """The ids that are not in the cache yet, at most `max_tokens`: int64 `(1, n)`."""
        start = self.sequence.length
        return self._ids_T[start : min(self._count, start + max_tokens)].unsqueeze(0)

    def report(self, stage: str) -> Result:
        """The keys that every result of this job has."""
        result: Result = {
            "job": self.job,
            "serial": self.serial,
            "identifier": self.job.identifier,
            "stage": stage,  # type: ignore[typeddict-item]
            "eos": False,
        }
        return result

    def report_prefill(self) -> Result:
        """How much of the prompt is in the cache."""
        result = self.report("prefill")
        result["curr_progress"] = self.sequence.length
        result["max_progress"] = len(self.job.prompt_ids)
        return result

    def accept(self, logits_V: Tensor) -> Result:
        """Choose the next token from the logits after the last one."""
        if self.is_prefilling:
            self._prefilled_at = perf_counter()
        token_id = self._choose(logits_V)
        self._append(token_id)
        new_tokens = self._count - len(self.job.prompt_ids)
        result = self.report("streaming")
        result["token_ids"] = torch.tensor([[token_id]])
        if token_id in self._stop_ids:
            result["eos_reason"] = "stop_token"
            result["eos_triggering_token_id"] = token_id
            result["text"] = self._finish_text(self._stream.flush())
            return self._finish(result)
        piece = self._stream.push(token_id)
        at_limit = new_tokens >= self.max_new_tokens
        if at_limit:
            piece += self._stream.flush()
        passed = self._stop_filter.push(piece)
        if isinstance(passed, StopMatch):
            result["eos_reason"] = "stop_string"
            result["eos_triggering_string"] = passed.string
            result["text"] = self._emit(passed.text)
            return self._finish(result)
        if at_limit:
            result["eos_reason"] = "max_new_tokens"
            result["text"] = self._emit(passed + self._stop_filter.flush())
            return self._finish(result)
        result["text"] = self._emit(passed)
        return result

    def _choose(self, logits_V: Tensor) -> int:
        new_tokens = self._count - len(self.job.prompt_ids)
        if new_tokens < self.job.min_new_tokens:
            stop = [token_id for token_id in self._stop_ids if token_id < logits_V.numel()]
            logits_V = logits_V.float().index_fill(
                0, torch.tensor(stop, dtype=torch.long, device=logits_V.device), float("-inf")
            )
        return self.job.sampler.sample(logits_V, self._ids_T[: self._count], self._random)

    def _append(self, token_id: int) -> None:
        if self._count == len(self._ids_T):
            self._ids_T = torch.cat([self._ids_T, self._ids_T.new_zeros(GROW_TOKENS)])
        self._ids_T[self._count] = token_id
        self._count += 1

    def _emit(self, text: str) -> str:
        self._text.append(text)
        return text

    def _finish_text(self, piece: str) -> str:
        """Last text before a stop token; a stop string that it completes still cuts it."""
        passed = self._stop_filter.push(piece)
        if isinstance(passed, StopMatch):
            return self._emit(passed.text)
        return self._emit(passed + self._stop_filter.flush())

    def _finish(self, result: Result) -> Result:
        now = perf_counter()
        result["eos"] = True
        result["full_completion"] = "".join(self._text)
        result["prompt_tokens"] = len(self.job.prompt_ids)
        result["new_tokens"] = self._count - len(self.job.prompt_ids)
        result["time_enqueued"] = self._started_at - self._enqueued_at
        result["time_prefill"] = self._prefilled_at - self._started_at
        result["time_generate"] = now - self._prefilled_at
        return result
