"""`Generator`: runs any number of jobs, as many at a time as the cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from exllamav3.cache import Cache
from exllamav3.errors import Exl3Error, FormatError, UnsupportedError
from exllamav3.generator.active import ActiveJob
from exllamav3.generator.decode_graphs import DecodeGraphs, HasForward
from exllamav3.generator.job import Job, Result
from exllamav3.generator.sampler import Sampler
from exllamav3.tokenizer import Tokenizer


class Generator:
    """Continues prompts, batching whatever is there to do.

    Each call of `iterate` processes one chunk of one waiting prompt, if there is one, and then one
    token of every job whose prompt is done. Jobs start in the order in which they are enqueued, as
    soon as the cache has room for their prompt and their longest completion.

    Prompts are processed alone, so what a prompt computes does not depend on the batch.

    Args:
        model: a loaded model.
        cache: a cache made for that model.
        tokenizer: its tokenizer.
        max_chunk_size: prompt tokens processed at a time.
        max_seq_len: longest sequence, prompt and completion; default the model's limit. The cache
            limits it as well.
        cuda_graphs: replay decode steps as CUDA graphs, see `decode_graphs`; by default on a GPU.

    Raises:
        FormatError: a limit is not positive.
        UnsupportedError: CUDA graphs are asked for and the model is not on a GPU.
    """

    def __init__(
        self,
        model: HasForward,
        cache: Cache,
        tokenizer: Tokenizer,
        max_chunk_size: int = 2048,
        max_seq_len: int | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        if max_chunk_size < 1:
            raise FormatError(f"Generator: max_chunk_size is {max_chunk_size}, expected at least 1")
        if max_seq_len is None:
            max_seq_len = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        max_seq_len = max_seq_len or cache.max_num_tokens
        self.model = model
        self.cache = cache
        self.tokenizer = tokenizer
        self.max_chunk_size = max_chunk_size
        self.max_seq_len: int = min(cache.max_num_tokens, max_seq_len)
        self._limits = f"cache {cache.max_num_tokens}, model or max_seq_len {max_seq_len}"
        self._graphs = _decode_graphs(model, cache, cuda_graphs)
        self._pending: deque[tuple[Job, int, float]] = deque()
        self._active: list[ActiveJob] = []
        self._next_serial = 0

    def enqueue(self, job: Job | Sequence[Job]) -> int | list[int]:
        """Add a job, or several, and return the serial numbers.

        Raises:
            FormatError: prompt and completion can never fit, the prompt has tokens that the model
            does not have, or the job has been enqueued before.
        """
        if not isinstance(job, Job):
            return [self._enqueue(one) for one in job]
        return self._enqueue(job)

    def _enqueue(self, job: Job) -> int:
        if job.serial is not None:
            raise FormatError(
                f"Generator: job {job.serial} was enqueued before; make a new Job for each run"
            )
        self._check_fits(job)
        job.serial = self._next_serial
        self._next_serial += 1
        self._pending.append((job, job.serial, perf_counter()))
        return job.serial

    def _check_fits(self, job: Job) -> None:
        prompt, new = len(job.prompt_ids), job.max_new_tokens or 1
        if prompt + new > self.max_seq_len:
            raise FormatError(
                f"Generator: a prompt of {prompt} tokens and {new} new tokens are "
                f"{prompt + new}, but a sequence is limited to {self.max_seq_len} tokens "
                f"({self._limits}); shorten the prompt, lower max_new_tokens or raise the limit"
            )

        # Found later, it would stop the jobs beside this one too.
        vocab_size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        last = max(job.prompt_ids)
        if vocab_size is not None and last >= vocab_size:
            raise FormatError(
                f"Generator: the prompt has token {last}, but the vocabulary of the model ends at "
                f"{vocab_size - 1}; tokenizer and model do not belong together, use the "
                f"tokenizer.json that came with the model"
            )

    def num_remaining_jobs(self) -> int:
        """Jobs that run or wait."""
        return len(self._pending) + len(self._active)

    def cancel(self, job: Job) -> None:
        """Drop a job wherever it is; nothing happens if it has ended."""
        self._pending = deque(entry for entry in self._pending if entry[0] is not job)
        for active in [a for a in self._active if a.job is job]:
            self._release(active)

    @torch.inference_mode()
    def iterate(self) -> list[Result]:
        """Do one round of work and report it; an empty list when there are no jobs."""
        results = [active.report("started") for active in self._start_jobs()]
        results += self._prefill()
        results += self._decode([a for a in self._active if not a.is_prefilling])
        return results

    def _start_jobs(self) -> Iterator[ActiveJob]:
        while self._pending:
            job, serial, enqueued_at = self._pending[0]
            prompt = len(job.prompt_ids)
            new = job.max_new_tokens or self.max_seq_len - prompt
            if not self.cache.fits(prompt + new):
                return
            self._pending.popleft()
            sequence = self.cache.new_sequence(prompt + new)
            active = ActiveJob(job, serial, sequence, new, self.tokenizer, enqueued_at)
            self._active.append(active)
            yield active

    def _prefill(self) -> list[Result]:
        """One chunk of the oldest unfinished prompt; its last chunk yields the first token."""
        active = next((a for a in self._active if a.is_prefilling), None)
        if active is None:
            return []
        logits_1V = self._forward([active], active.next_ids(self.max_chunk_size))
        results = [active.report_prefill()]
        if active.sequence.length == len(active.job.prompt_ids):
            results += self._accept([active], logits_1V)
        return results

    def _decode(self, batch: list[ActiveJob]) -> list[Result]:
        # A job that has just got its first token has it as its one id to process.
        if not batch:
            return []
        ids_B1 = torch.cat([active.next_ids(1) for active in batch])
        if self._graphs is None:
            return self._accept(batch, self._forward(batch, ids_B1))
        logits_BV = self._graphs.step([active.sequence for active in batch], ids_B1)
        for active in batch:
            active.sequence.length += 1
        return self._accept(batch, logits_BV)

    def _forward(self, batch: list[ActiveJob], ids_BS: Tensor) -> Tensor:
        """Run the model on new ids, one row a job; return the logits `(b, vocab)` of the last."""
        params = {
            "cache": self.cache,
            "sequences": [active.sequence for active in batch],
            "cache_seqlens": torch.tensor([active.sequence.length for active in batch]),
            "last_tokens_only": 1,
        }
        logits_BV = self.model.forward(ids_BS, params)[:, -1]
        for active in batch:
            active.sequence.length += ids_BS.shape[1]
        return logits_BV

    def _accept(self, batch: list[ActiveJob], logits_BV: Tensor) -> list[Result]:
        results = []
        for active, logits_V in zip(batch, logits_BV, strict=True):
            try:
                result = active.accept(logits_V)
            except Exl3Error:
                self._release(active)  # the job is lost, the others go on
                raise
            if result["eos"]:
                self._release(active)
            results.append(result)
        return results

    def _release(self, active: ActiveJob) -> None:
        self._active.remove(active)
        self.cache.release(active.sequence)

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int = 0,
        add_bos: bool = False,
        completion_only: bool = False,
        sampler: Sampler | None = None,
        stop_conditions: Sequence[str | int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stream: bool = False,
    ) -> str | list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """Continue a prompt, or a list of prompts in one batch.

        Args:
            prompt: text, or texts of any lengths.
            max_new_tokens: at most this many tokens for each; None for as many as fit.
            add_bos, encode_special_tokens: see `Tokenizer.encode`.
            completion_only: leave the prompt out of what is returned.
            seed: of every prompt's own random numbers, so that each completion is the same as if
                its prompt came alone.
            stream: return an iterator of pieces instead; joined they are the whole text.
            min_new_tokens, sampler, stop_conditions, ignore_eos, decode_special_tokens: see `Job`.

        Returns:
            The text, or a list of texts for a list of prompts. With `stream`: an iterator of
            pieces of text, or of `(index of the prompt, piece)` for a list.

        Raises:
            FormatError: an argument is outside its domain, a sequence cannot fit, or jobs are
                still running (their results would be lost; call `iterate` until they end).
        """
        if self.num_remaining_jobs():
            raise FormatError(
                f"Generator: {self.num_remaining_jobs()} jobs are still running, generate() would "
                f"lose their results; call iterate() until they end, or cancel() them"
            )
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        jobs = [
            Job(
                self.tokenizer.encode_ids(text, add_bos, encode_special_tokens),
                max_new_tokens,
                min_new_tokens=min_new_tokens,
                sampler=sampler,
                stop_conditions=stop_conditions,
                ignore_eos=ignore_eos,
                seed=seed,
                identifier=index,
                decode_special_tokens=decode_special_tokens,
            )
            for index, text in enumerate(prompts)
        ]
        for job in jobs:
            self._check_fits(job)  # before the iterator is first used
        pieces = self._pieces(jobs, [] if completion_only else prompts)
        if stream:
            return (piece for _, piece in pieces) if isinstance(prompt, str) else pieces
        texts = [""] * len(jobs)
        for index, piece in pieces:
            texts[index] += piece
        return texts[0] if isinstance(prompt, str) else texts

    def _pieces(self, jobs: list[Job], prompts: list[str]) -> Iterator[tuple[int, str]]:
        try:
            self.enqueue(jobs)
            yield from enumerate(prompts)
            while self.num_remaining_jobs():
                for result in self.iterate():
                    if result.get("text"):
                        yield result["identifier"], result["text"]
        finally:  # an abandoned iterator, or an error in one job
            for job in jobs:
                self.cancel(job)


def _decode_graphs(model: HasForward, cache: Cache, wanted: bool | None) -> DecodeGraphs | None:
    device = getattr(model, "device", None)
    on_gpu = isinstance(device, torch.device) and device.type == "cuda"
    if wanted and not on_gpu:
        raise UnsupportedError(
            f"Generator: cuda_graphs=True needs a model loaded on a GPU, this one is on {device}; "
            f"leave it out, or load the model with device='cuda'"
        )
    if not on_gpu or wanted is False:
        return None
    assert isinstance(device, torch.device)
    return DecodeGraphs(model, cache, device)
