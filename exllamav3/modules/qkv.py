"""The two ways an attention block stores its q, k and v projections, and the three to compute them.

`SplitQkv` holds three linears, `FusedQkv` one whose columns are q, k, v in that order. Both have
the same `project`, so attention knows neither. Three linears take three launches, or one grouped
launch on a GPU. Source: docs/qkv_topology.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.grouped import can_group, forward_grouped
from exllamav3.modules.linear import Linear, LinearKind
from exllamav3.ops import deinterleave_qg, deinterleave_qg_reference
from exllamav3.topology import COMPONENTS, FUSED_NAME

QkvRoute = Literal["auto", "split"]
"""How three stored linears run: "split" is always three launches, "auto" groups them where one
launch is faster (see `modules.grouped`). The results are the same bit for bit."""


@dataclass(frozen=True, slots=True)
class QkvGeometry:
    """Widths of the projections of one attention block.

    gated: the q projection is interleaved with an output gate, per head `head_dim` query lanes
        and then `head_dim` gate lanes, so it is twice as wide.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    bias: bool = False

    @property
    def output_splits(self) -> tuple[int, int, int]:
        """Unpadded output widths of q (with its gate), k and v."""
        kv = self.kv_heads * self.head_dim
        return self.heads * self.head_dim * (2 if self.gated else 1), kv, kv


Projected = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q `(b, s, heads, head_dim)`, k and v `(b, s, kv_heads, head_dim)`, gate `(b, s, heads *
head_dim)` or None. k and v may be strided views."""


def _linear(
    attn_key: str, name: str, geometry: QkvGeometry, width: int, qbits_key: LinearKind
) -> Linear:
    return Linear(
        f"{attn_key}.{name}",
        geometry.hidden_size,
        width,
        bias=geometry.bias,
        qmap="block.attn.input",
        qbits_key=qbits_key,
        qgroup=f"{attn_key}.qkv",
    )


class SplitQkv:
    """Three linears; each has its own rate, codebook and scales.

    Attributes:
        linears: q, k, v, for the module tree.
        routes: passes by the way they took, `routes["split"]` and `routes["grouped"]`.
        route: which ways it may take.
    """

    is_fused = False
    route: QkvRoute = "auto"

    def __init__(self, attn_key: str, geometry: QkvGeometry, qbits_key: LinearKind = "bits"):
        self.geometry = geometry
        self.q_proj, self.k_proj, self.v_proj = self.linears = tuple(
            _linear(attn_key, name, geometry, width, qbits_key)
            for name, width in zip(COMPONENTS, geometry.output_splits, strict=True)
        )
        self.routes: Counter[str] = Counter()

    def project(self, x: Tensor, ctx: ForwardContext) -> Projected:
        """Apply to `(b, s, hidden)`; see `Projected`."""
        if self.route == "auto" and can_group(self.linears, x, ctx):
            q, k, v = forward_grouped(self.linears, x)
            self.routes["grouped"] += 1
        else:
            q, k, v = (linear.forward(x, ctx) for linear in self.linears)
            self.routes["split"] += 1
        return _shape(q, k, v, self.geometry)


class FusedQkv:
    """One linear whose output columns are q, k and v in that order.

    Attributes:
        linears: the one linear, for the module tree.
        routes: passes by the way they took, `routes["fused"]`.
    """

    is_fused = True

    def __init__(self, attn_key: str, geometry: QkvGeometry, qbits_key: LinearKind = "bits"):
        self.geometry = geometry
        width = sum(geometry.output_splits)
        self.qkv_proj = _linear(attn_key, FUSED_NAME, geometry, width, qbits_key)
        self.linears = (self.qkv_proj,)
        self.routes: Counter[str] = Counter()

    def project(self, x: Tensor, ctx: ForwardContext) -> Projected:
        """Apply to `(b, s, hidden)`; see `Projected`. k and v are views, nothing is copied."""
        qkv = self.qkv_proj.forward(x, ctx)
        self.routes["fused"] += 1
        q, k, v = qkv.split(self.geometry.output_splits, dim=-1)
        return _shape(q, k, v, self.geometry)


def check_qkv_route(route: str) -> QkvRoute:
    """The route, if it is one.

    Raises:
        FormatError: it is not.
    """
    if route not in get_args(QkvRoute):
        raise FormatError(
            f"qkv_route is {route!r}, expected one of {', '.join(get_args(QkvRoute))}; a fused "
            f"block is fused by its checkpoint, not by this setting"
        )
    return route  # type: ignore[return-value]


def _shape(q: Tensor, k: Tensor, v: Tensor, geometry: QkvGeometry) -> Projected:
    """Cut projections into heads, and q from its gate."""
    head_dim = geometry.head_dim
    k, v = k.unflatten(-1, (geometry.kv_heads, head_dim)), v.unflatten(-1, (-1, head_dim))
    if not geometry.gated:
        return q.unflatten(-1, (geometry.heads, head_dim)), k, v, None
    # The op takes whole contiguous rows; of a fused output only the q part is copied for it.
    q = q.contiguous()
    fast = q.dtype == torch.float16 and head_dim % 8 == 0
    query, gate = (deinterleave_qg if fast else deinterleave_qg_reference)(q, head_dim)
    return query, k, v, gate
