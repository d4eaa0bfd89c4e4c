"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5).

The recurrence per value head, with state S `(key_dim, value_dim)`:

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

Inputs pass a causal depthwise convolution first, q and k are normalised to unit length. All of
it runs in float32. Source: transformers, `Qwen3_5GatedDeltaNet`, `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from exllamav3.modules.context import ForwardContext, RecurrentSpec
from exllamav3.modules.grouped import forward_all
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import Module, TensorSource, read_weight
from exllamav3.modules.norm import GatedRMSNorm
from exllamav3.ops import advance_delta_rule, delta_inputs, gated_delta_rule


@dataclass(frozen=True, slots=True)
class DeltaGeometry:
    """Sizes of a gated delta net.

    grouped: projections are stored as `in_proj_qkvz` and `in_proj_ba`, rows grouped by key head
        (Qwen3-Next), instead of `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    grouped: bool = False

    @property
    def key_width(self) -> int:
        """Width of all q heads, and of all k heads."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all v heads, and of z."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.key_width + self.value_width


class GatedDeltaNet(Module):
    """The linear attention of one block.

    Args:
        key: dotted path, e.g. `model.layers.0.linear_attn`.
        layer: decoder layer number, by which a cache knows it.
        geometry: sizes.
        eps: of the output norm.
    """

    def __init__(self, key: str, layer: int, geometry: DeltaGeometry, eps: float) -> None:
        super().__init__(key)
        self.layer, self.geometry = layer, geometry
        self.q_priority = 1
        hidden = geometry.hidden_size

        def quantized(name: str, width: int) -> Linear:
            return Linear(
                f"{key}.{name}",
                hidden,
                width,
                qmap="block.attn.input",
                qbits_key="bits",
                qgroup=f"{key}.qkvz",
            )

        def dense(name: str, width: int) -> Linear:
            return Linear(f"{key}.{name}", hidden, width)

        self.inputs: tuple[Linear, ...]
        if geometry.grouped:
            width = geometry.conv_channels + geometry.value_width
            self.inputs = (
                quantized("in_proj_qkvz", width),
                dense("in_proj_ba", 2 * geometry.value_heads),
            )
        else:
            self.inputs = (
                quantized("in_proj_qkv", geometry.conv_channels),
                quantized("in_proj_z", geometry.value_width),
                dense("in_proj_b", geometry.value_heads),
                dense("in_proj_a", geometry.value_heads),
            )
        self.out_proj = Linear(
            f"{key}.out_proj",
            geometry.value_width,
            hidden,
            qmap="block.attn.output",
            qbits_key="bits",
            qgroup=f"{key}.o",
            out_dtype=torch.float32,
        )
        self.norm = GatedRMSNorm(f"{key}.norm", geometry.value_dim, eps)
        self.modules = [*self.inputs, self.out_proj, self.norm]
        self._own: dict[str, Tensor] = {}
        self._stored_dtypes: dict[str, torch.dtype] = {}
        self._gates: Tensor | None = None  # in_proj_b and in_proj_a one above the other

    @property
    def cache_spec(self) -> RecurrentSpec:
        """What a cache stores for this layer."""
        g = self.geometry
        return RecurrentSpec(
            self.layer, g.conv_channels, g.conv_kernel, g.value_heads, g.key_dim, g.value_dim
        )

    def _own_shapes(self) -> dict[str, tuple[int, ...]]:
        g = self.geometry
        return {
            "A_log": (g.value_heads,),
            "dt_bias": (g.value_heads,),
            "conv1d.weight": (g.conv_channels, 1, g.conv_kernel),
        }

    def own_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Decay, time step bias and convolution; never quantized."""
        return tuple(f"{self.key}.{name}" for name in self._own_shapes())

    def load_own(self, source: TensorSource) -> None:
        """Read them and hold them in float32."""
        self._gates = None
        for name, shape in self._own_shapes().items():
            tensor, self._stored_dtypes[name] = read_weight(
                source, f"{self.key}.{name}", shape, "gated delta net parameter"
            )
            self._own[name] = tensor.to(self.device, torch.float32)

    def own_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """Those of its parameters, and of the copy that a GPU makes of the gate projections."""
        g = self.geometry
        own = sum(map(prod, self._own_shapes().values())) * torch.float32.itemsize
        gates = 0 if g.grouped else 2 * g.value_heads * g.hidden_size * dtype.itemsize
        return own + gates

    def unload_own(self) -> None:
        """Drop them."""
        self._own.clear()
        self._gates = None

    def get_tensors(self) -> dict[str, Tensor]:
        """Them in the dtype they came in."""
        return {f"{self.key}.{n}": t.to(self._stored_dtypes[n]) for n, t in self._own.items()}

    def _project(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four inputs in either storage form.

        Returns:
            qkv `(b, s, conv_channels)` ordered q, k, v; z `(b, s, value_heads, value_dim)`;
            b and a `(b, s, value_heads)`.
        """
        g = self.geometry
        if not g.grouped:
            qkv, z = forward_all(self.inputs[:2], x, ctx)
            b, a = self._project_gates(x, ctx)
            return qkv, z.unflatten(-1, (g.value_heads, g.value_dim)), b, a
        projected = [linear.forward(x, ctx) for linear in self.inputs]
        per_key = g.value_heads // g.key_heads
        qkvz, ba = (t.unflatten(-1, (g.key_heads, -1)) for t in projected)
        widths = [g.key_dim, g.key_dim, per_key * g.value_dim, per_key * g.value_dim]
        q, k, v, z = qkvz.split(widths, dim=-1)
        b, a = ba.split(per_key, dim=-1)
        qkv = torch.cat([t.flatten(-2) for t in (q, k, v)], dim=-1)
        return qkv, z.reshape(*z.shape[:2], -1, g.value_dim), b.flatten(-2), a.flatten(-2)

    def _project_gates(self, x: Tensor, ctx: ForwardContext) -> list[Tensor]:
        """b and a; on a GPU one product, because two are twice the launches and no less work."""
        pair = self.inputs[2:]
        weights = [linear.weight for linear in pair if isinstance(linear.weight, Tensor)]
        if not x.is_cuda or len(weights) != 2:
            return [linear.forward(x, ctx) for linear in pair]
        if self._gates is None:
            self._gates = torch.cat(weights)
        return list(F.linear(x, self._gates).chunk(2, dim=-1))

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(b, s, hidden)` activations to float32 `(b, s, hidden)`."""
        geometry = self.geometry
        qkv, z, b, a = self._project(x, ctx)
        if ctx.cache is None:
            kept = (geometry.conv_channels, geometry.conv_kernel - 1)
            conv = x.new_zeros(x.shape[0], *kept, dtype=torch.float32)
        else:
            conv = ctx.cache.read_conv(self.layer, ctx).float()
        q, k, v, g, beta, conv = delta_inputs(
            qkv,
            conv,
            self._own["conv1d.weight"],
            a,
            b,
            self._own["A_log"],
            self._own["dt_bias"],
            ctx.new_lengths,
            geometry.key_heads,
            geometry.key_dim,
        )
        if ctx.cache is None:
            sizes = (geometry.value_heads, geometry.key_dim, geometry.value_dim)
            o, _ = gated_delta_rule(
                q, k, v, g, beta, x.new_zeros(x.shape[0], *sizes, dtype=torch.float32)
            )
        else:
            ctx.cache.write_conv(self.layer, conv, ctx)
            o = advance_delta_rule(q, k, v, g, beta, *ctx.cache.delta_states(self.layer, ctx))
        return self.out_proj.forward(self.norm.gated(o, z).flatten(-2), ctx)
