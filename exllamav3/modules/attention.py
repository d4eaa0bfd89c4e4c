"""Grouped-query softmax attention with optional q/k norms and output gate.

How q, k and v are stored is no concern of this file; see `modules/qkv.py`.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from exllamav3.modules.context import ForwardContext, KvSpec
from exllamav3.modules.linear import Linear, LinearKind
from exllamav3.modules.module import Module
from exllamav3.modules.norm import RMSNorm
from exllamav3.modules.qkv import FusedQkv, QkvGeometry, SplitQkv, check_qkv_route
from exllamav3.modules.rope import Rope
from exllamav3.modules.sdpa import attend
from exllamav3.ops import gate_mul


class Attention(Module):
    """Softmax attention of one block.

    Args:
        key: dotted path, e.g. `model.layers.3.self_attn`.
        layer: decoder layer number, by which a cache knows it.
        geometry: widths of the projections.
        rope: rotation shared by the model's layers.
        qk_norm: `(eps, offset)` of the norms over the head dimension of q and k, None without.
        fused: one stored `qkv_proj` in place of q, k and v.
        output_bias: whether `o_proj` has a bias.
        qbits_key: which bit setting its linears follow, "bits" or "mtp_bits".
    """

    def __init__(
        self,
        key: str,
        layer: int,
        geometry: QkvGeometry,
        rope: Rope,
        *,
        qk_norm: tuple[float, float] | None = None,
        fused: bool = False,
        output_bias: bool = False,
        qbits_key: LinearKind = "bits",
    ) -> None:
        super().__init__(key)
        self.layer, self.geometry, self.rope = layer, geometry, rope
        self.q_priority = 2
        self.qkv = (FusedQkv if fused else SplitQkv)(key, geometry, qbits_key)
        self.o_proj = Linear(
            f"{key}.o_proj",
            geometry.heads * geometry.head_dim,
            geometry.hidden_size,
            bias=output_bias,
            qmap="block.attn.o",
            qbits_key=qbits_key,
            qgroup=f"{key}.o",
            out_dtype=torch.float32,
        )
        self.modules = [*self.qkv.linears, self.o_proj]
        self.q_norm = self.k_norm = None
        if qk_norm is not None:
            eps, offset = qk_norm
            self.q_norm = RMSNorm(f"{key}.q_norm", geometry.head_dim, eps, offset)
            self.k_norm = RMSNorm(f"{key}.k_norm", geometry.head_dim, eps, offset)
            self.modules += [self.q_norm, self.k_norm]

    @property
    def is_fused(self) -> bool:
        """Whether q, k and v are one stored matrix."""
        return self.qkv.is_fused

    @property
    def routes(self) -> Counter[str]:
        """How many passes took each route: "split", "grouped" or "fused".

        Replays of a captured graph are not passes of this module and are not counted.
        """
        return self.qkv.routes

    def set_qkv_route(self, route: str) -> None:
        """Choose how split projections run, see `modules.qkv.QkvRoute`; fused ones have no choice.

        Raises:
            FormatError: there is no such route.
        """
        checked = check_qkv_route(route)
        if isinstance(self.qkv, SplitQkv):
            self.qkv.route = checked

    @property
    def cache_spec(self) -> KvSpec:
        """What a cache stores for this layer."""
        return KvSpec(self.layer, self.geometry.kv_heads, self.geometry.head_dim)

    def project_qkv(
        self, x: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Projections before norms and rotation, see `modules.qkv.Projected`."""
        return self.qkv.project(x, ctx)

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(b, s, hidden)` activations to float32 `(b, s, hidden)`."""
        q, k, v, gate = self.project_qkv(x, ctx)
        q, k = self.rope.apply(q, ctx, self.q_norm), self.rope.apply(k, ctx, self.k_norm)
        if ctx.cache is not None:
            k, v = ctx.cache.update_kv(self.layer, k, v, ctx)
        o = attend(q, k, v, ctx).flatten(-2)
        if gate is not None:
            o = gate_mul(gate, o, silu=False)
        return self.o_proj.forward(o, ctx)
