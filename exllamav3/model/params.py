"""What a caller may say about one forward pass, checked and turned into a `ForwardContext`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.modules.context import BindableCache, ForwardContext

KNOWN = {
    "attn_mode": '"flash_attn_nc" (no cache) or "flash_attn" (with `cache`); optional',
    "cache": "a cache made for this model; without one the ids are whole sequences",
    "past_len": "tokens already cached, the same for every row; 0 without it",
    "cache_seqlens": "int (b,): tokens already cached for each row, instead of past_len",
    "new_lengths": "int (b,): real tokens of each row, the rest of the row is padding",
    "last_tokens_only": "logits of the last n real tokens of each row only",
    "capture": "receives the inputs of linears, see modules.context.Capture",
    "sequences": "for the cache: one of its sequences for each row",
    "batch_shape": "for the cache: (rows, tokens a row)",
    "block_table": "for the cache: int (b, pages)",
}
"""Keys of `params`."""


def make_context(
    ids: Tensor, params: Mapping[str, Any], device: torch.device, vocab_size: int
) -> ForwardContext:
    """Check ids and parameters of one pass.

    Raises:
        FormatError: an unknown key, ids outside the vocabulary or of a wrong shape or dtype, or
            lengths that do not fit them.
    """
    _check_ids(ids, vocab_size)
    batch, seq = ids.shape
    return context_of_shape(batch, seq, params, device)


def context_of_shape(
    batch: int, seq: int, params: Mapping[str, Any], device: torch.device
) -> ForwardContext:
    """The same for `batch` rows of `seq` ids that are known to be good.

    Raises:
        FormatError: an unknown key, or lengths of a wrong shape or dtype.
    """
    for key in params:
        if key not in KNOWN:
            raise FormatError(f"params[{key!r}] is unknown; there are {', '.join(KNOWN)}")
    cache = _cache(params)
    past = _past(params, batch, cached=cache is not None)
    positions = torch.arange(seq, device=device).expand(batch, seq)
    if isinstance(past, Tensor):
        positions = positions + past.to(device, torch.int64)[:, None]
    elif past:
        positions = positions + past
    lengths = _lengths(params.get("new_lengths"), "new_lengths", batch)
    return ForwardContext(
        positions=positions,
        new_lengths=None if lengths is None else lengths.to(device, torch.int64),
        cache=None if cache is None else cache.bind(params, batch),
        capture=params.get("capture"),
    )


def last_places(x: Tensor, count: Any, ctx: ForwardContext) -> Tensor:
    """The last `count` real places of each row.

    Args:
        x: `(b, s, features)`.
        count: how many; a row with fewer real tokens repeats its first.

    Returns:
        `(b, min(count, s), features)`.

    Raises:
        FormatError: `count` is not a positive whole number.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise FormatError(f"params['last_tokens_only'] is {count!r}, expected a count of tokens")
    count = min(count, x.shape[1])
    if ctx.new_lengths is None:
        return x[:, -count:]
    places = ctx.new_lengths[:, None] - count + torch.arange(count, device=x.device)
    return x.gather(1, places.clamp_min(0)[..., None].expand(-1, -1, x.shape[-1]))


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    integral = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not integral or ids.dim() != 2 or not ids.numel():
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise FormatError(f"ids: found {found}, expected a non-empty int64 tensor (batch, seq)")
    # On a GPU the check would stall the stream; the embedding kernel traps there instead.
    if ids.device.type == "cpu" and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise FormatError(
            f"ids: range {int(ids.min())}..{int(ids.max())} leaves the vocabulary of {vocab_size}; "
            f"tokenizer and model do not belong together"
        )


def _cache(params: Mapping[str, Any]) -> BindableCache | None:
    cache: BindableCache | None = params.get("cache")
    mode = params.get("attn_mode")
    expected = {None: cache is not None, "flash_attn": True, "flash_attn_nc": False}
    if mode not in expected:
        raise FormatError(f"params['attn_mode'] is {mode!r}, expected {KNOWN['attn_mode']}")
    if expected[mode] != (cache is not None):
        raise FormatError(
            f"params['attn_mode'] is {mode!r}, which {'needs' if cache is None else 'excludes'} "
            f"params['cache']"
        )
    return cache


def _lengths(value: Any, key: str, batch: int) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.is_floating_point() or value.shape != (batch,):
        raise FormatError(f"params[{key!r}] must be an integer tensor of shape ({batch},)")
    return value


def _past(params: Mapping[str, Any], batch: int, *, cached: bool) -> int | Tensor:
    lengths = _lengths(params.get("cache_seqlens"), "cache_seqlens", batch)
    past = params.get("past_len", 0)
    if isinstance(past, bool) or not isinstance(past, int) or past < 0:
        raise FormatError(f"params['past_len'] is {past!r}, expected a count of tokens")
    if lengths is not None and "past_len" in params:
        raise FormatError("params: past_len and cache_seqlens exclude each other")
    if not cached and (past or lengths is not None):
        raise FormatError("params: past tokens are given, but no cache that could hold them")
    return past if lengths is None else lengths
