"""Softmax attention over cached or fresh keys: one table of backends.

Each backend declares what it takes; `attend` gives it nothing else. A value tensor that is a
strided view of a fused projection is made contiguous here for a backend that needs that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exllamav3.modules.context import ForwardContext


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to attend.

    run: `(q, k, v, ctx) -> o`, q and o `(b, s, heads, head_dim)`, k and v
        `(b, t, kv_heads, head_dim)`; see `attend`.
    accepts: whether it can serve these q and k in this pass.
    takes_strided: whether k and v may be strided views.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, ForwardContext], Tensor]
    accepts: Callable[[Tensor, Tensor, ForwardContext], bool]
    takes_strided: bool


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
    """torch's own dispatcher; it reads strides, so it takes any layout."""
    mask = _mask(q.shape[1], k.shape[1], ctx)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def _cached_flash(q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
    """FlashAttention over rows of unequal length, as torch ships it.

    With a mask, torch's dispatcher knows no fast kernel for grouped heads. Here the lengths of the
    rows go in instead; they stay on the device, and a single query is split over the keys. Causal
    order is aligned to the end of each row's keys, which is where its new tokens are.
    """
    batch, new, total = q.shape[0], q.shape[1], k.shape[1]
    starts_q, starts_k, used = _lengths(batch, new, total, ctx)
    o = torch.ops.aten._flash_attention_forward(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        starts_q,
        starts_k,
        new,
        total,
        0.0,
        new > 1,
        False,
        seqused_k=used,
    )[0]
    return o.view(q.shape)


def _takes_cached_flash(q: Tensor, k: Tensor, ctx: ForwardContext) -> bool:
    is_fast = q.is_cuda and q.dtype == torch.float16 and q.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    # Right-padded rows would count their padding as used keys.
    return is_fast and ctx.cache is not None and ctx.new_lengths is None


BACKENDS = (
    Backend("cached_flash", _cached_flash, _takes_cached_flash, takes_strided=False),
    Backend("torch_sdpa", _torch_sdpa, lambda q, k, ctx: True, takes_strided=True),
)
"""In order of preference; the last one accepts everything."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: ForwardContext,
    backends: tuple[Backend, ...] = BACKENDS,
) -> Tensor:
    """Causal attention of new tokens over all keys.

    Args:
        q: `(b, s, heads, head_dim)`.
        k, v: `(b, t, kv_heads, head_dim)`, index = position of the key; v may be strided.
        ctx: its positions say which keys each query may look at.

    Returns:
        `(b, s, heads, head_dim)` in the dtype of q.
    """
    backend = next(b for b in backends if b.accepts(q, k, ctx))
    if not backend.takes_strided:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return backend.run(q, k, v, ctx)


def _mask(new: int, total: int, ctx: ForwardContext) -> Tensor | None:
    """Which keys each query may look at, bool `(b, 1, s, t)`; None where plain causal order says
    it all.

    Right-padded tokens come after all real ones, so uncached passes need no mask for them.
    """
    if ctx.cache is None:
        return None
    name = ("mask", new, total)
    mask: Tensor | None = ctx.shared.get(name)
    if mask is None:
        keys = torch.arange(total, device=ctx.positions.device)
        mask = ctx.shared[name] = keys <= ctx.positions[:, None, :, None]
    return mask


def _lengths(
    batch: int, new: int, total: int, ctx: ForwardContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows start among all queries and all keys, int32 `(b + 1)`; keys in use `(b,)`."""
    name = ("lengths", batch, new, total)
    lengths: tuple[Tensor, Tensor, Tensor] | None = ctx.shared.get(name)
    if lengths is None:
        rows = torch.arange(batch + 1, dtype=torch.int32, device=ctx.positions.device)
        used = (ctx.positions[:, -1] + 1).to(torch.int32)
        lengths = ctx.shared[name] = (rows * new, rows * total, used)
    return lengths
