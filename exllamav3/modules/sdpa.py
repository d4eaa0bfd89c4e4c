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

    run: `(q, k, v, mask) -> o`, q and o `(b, s, heads, head_dim)`, k and v
        `(b, t, kv_heads, head_dim)`; mask bool `(b, 1, s, t)`, True where a query may look, or
        None for a causal pass over whole sequences (`s == t`).
    accepts: whether it can serve these tensors.
    takes_strided: whether k and v may be strided views.
    """

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    accepts: Callable[[Tensor, Tensor], bool]
    takes_strided: bool


def _torch_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's own dispatcher; it reads strides, so it takes any layout."""
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


BACKENDS = (Backend("torch_sdpa", _torch_sdpa, lambda q, k: True, takes_strided=True),)
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
        ctx: its positions make the mask.

    Returns:
        `(b, s, heads, head_dim)` in the dtype of q.
    """
    backend = next(b for b in backends if b.accepts(q, k))
    if not backend.takes_strided:
        k, v = k.contiguous(), v.contiguous()
    return backend.run(q, k, v, _mask(q.shape[1], k.shape[1], ctx))


def _mask(new: int, total: int, ctx: ForwardContext) -> Tensor | None:
    """Which keys each query may look at, None where plain causal order says it all.

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
