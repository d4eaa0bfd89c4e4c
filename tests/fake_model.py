"""A tiny hybrid model with random weights, for tests of the cache and the generator.

One softmax attention layer (number 3, so that layer numbers have gaps) and one recurrent layer
with a convolution window and a decaying state. Small enough to be read; float64 inside.
"""

from __future__ import annotations

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from exllamav3.generator import Generator
from exllamav3.modules.context import ForwardContext, KvSpec, RecurrentSpec
from exllamav3.tokenizer import Tokenizer
from exllamav3.tokenizer.special import SpecialTokens

KV = KvSpec(layer=3, kv_heads=2, head_dim=4)
RECURRENT = RecurrentSpec(
    layer=0, conv_channels=8, conv_kernel=3, value_heads=2, key_dim=4, value_dim=4
)


class FakeModel:
    """`forward(ids, params) -> logits (b, s, vocab)`; `calls` lists the shapes of its batches."""

    def __init__(self, vocab=258, seed=0, recurrent=True):
        random = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return torch.randn(shape, generator=random) / shape[-1] ** 0.5

        self.embedding, self.head = weight(vocab, 8), weight(8, vocab) * 8
        self.q, self.k, self.v = weight(8, 8), weight(8, 8), weight(8, 8)
        self.conv, self.key = weight(8, 3), weight(8, 8)
        self.recurrent = recurrent
        self.calls = []

    def cache_specs(self):
        return [RECURRENT, KV] if self.recurrent else [KV]

    def expect_cache(self, cache):
        pass

    def forward(self, ids, params):
        batch, seq = ids.shape
        self.calls.append((batch, seq))
        past = torch.as_tensor(params.get("cache_seqlens", params.get("past_len", 0)))
        positions = past.reshape(-1, 1) + torch.arange(seq)
        cache = params.get("cache")
        ctx = ForwardContext(
            positions.expand(batch, seq),
            params.get("new_lengths"),
            None if cache is None else cache.bind(params, batch),
        )
        x = self.embedding[ids]
        if self.recurrent:
            x = x + self._recur(x, ctx)
        x = x + self._attend(x, ctx)
        logits = x @ self.head
        return logits[:, -params["last_tokens_only"] :] if "last_tokens_only" in params else logits

    def _recur(self, x, ctx):
        batch, seq = x.shape[:2]
        conv, delta = torch.zeros(batch, 8, 2), torch.zeros(batch, 2, 4, 4)
        if ctx.cache is not None:
            conv = ctx.cache.read_conv(0, ctx)
            states, slots, is_new = ctx.cache.delta_states(0, ctx)
            delta = states[slots].masked_fill(is_new[:, None, None, None], 0)
        outputs = []
        for i in range(seq):
            real = torch.ones(batch, dtype=torch.bool)
            if ctx.new_lengths is not None:
                real = i < ctx.new_lengths
            window = torch.cat([conv, x[:, i, :, None]], dim=-1)
            mixed = (window * self.conv).sum(-1).view(batch, 2, 4)
            key = (x[:, i] @ self.key).view(batch, 2, 4)
            updated = delta * 0.9 + key[..., :, None] * mixed[..., None, :]
            delta = torch.where(real[:, None, None, None], updated, delta)
            conv = torch.where(real[:, None, None], window[..., 1:], conv)
            outputs.append((key[..., None, :] @ delta).flatten(1))
        if ctx.cache is not None:
            ctx.cache.write_conv(0, conv, ctx)
            states[slots] = delta
        return torch.stack(outputs, dim=1).tanh()

    def _attend(self, x, ctx):
        batch, seq = x.shape[:2]
        q, k, v = ((x @ w).view(batch, seq, 2, 4) for w in (self.q, self.k, self.v))
        k = k + torch.sin(ctx.positions[..., None, None].float() * torch.arange(1, 5))
        if ctx.cache is not None:
            k, v = ctx.cache.update_kv(3, k, v, ctx)
        scores = torch.einsum("bshd,bthd->bhst", q, k)
        hidden = torch.arange(k.shape[1]) > ctx.positions[:, None, :, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("bhst,bthd->bshd", weights, v).flatten(2)


def byte_tokenizer():
    """Ids 2..257 are bytes, 0 is the end, 1 padding."""
    vocab = {"<|end|>": 0, "<|pad|>": 1}
    vocab |= {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=2)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|pad|>"])
    return Tokenizer(backend, SpecialTokens(None, 0, 1, None, (0,)), None)


def greedy_uncached(model, ids, count):
    """The tokens that repeated uncached forward passes choose."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.forward(torch.tensor([ids]), {})[0, -1].argmax()))
    return ids[-count:]


def run_jobs(generator: Generator, jobs):
    """Enqueue and run jobs; return `{identifier: token ids}` and all the results."""
    generator.enqueue(jobs)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    tokens = {job.identifier: [] for job in jobs}
    for result in results:
        if result["stage"] == "streaming":
            tokens[result["identifier"]] += result["token_ids"].flatten().tolist()
    return tokens, results
