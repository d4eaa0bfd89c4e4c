"""Linear attention by the gated delta rule (Qwen3-Next, Qwen3.5).

The recurrence per value head, with state S `(key_dim, value_dim)`:

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

Inputs pass a causal depthwise convolution first, q and k are normalised to unit length. All of
it runs in float32. Source: transformers, `Qwen3_5GatedDeltaNet`, `Qwen3NextGatedDeltaNet`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exllamav3.modules.context import ForwardContext, RecurrentSpec
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import Module, TensorSource, read_weight
from exllamav3.modules.norm import GatedRMSNorm
from exllamav3.ops import gated_delta_rule

L2_EPS = 1e-6


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
        for name, shape in self._own_shapes().items():
            tensor, self._stored_dtypes[name] = read_weight(
                source, f"{self.key}.{name}", shape, "gated delta net parameter"
            )
            self._own[name] = tensor.to(self.device, torch.float32)

    def unload_own(self) -> None:
        """Drop them."""
        self._own.clear()

    def get_tensors(self) -> dict[str, Tensor]:
        """Them in the dtype they came in."""
        return {f"{self.key}.{n}": t.to(self._stored_dtypes[n]) for n, t in self._own.items()}

    def own_numel(self) -> int:
        """Their elements."""
        return sum(torch.Size(shape).numel() for shape in self._own_shapes().values())

    def _project(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four inputs in either storage form.

        Returns:
            qkv `(b, s, conv_channels)` ordered q, k, v; z `(b, s, value_heads, value_dim)`;
            b and a `(b, s, value_heads)`.
        """
        g = self.geometry
        projected = [linear.forward(x, ctx) for linear in self.inputs]
        if not g.grouped:
            qkv, z, b, a = projected
            return qkv, z.unflatten(-1, (g.value_heads, g.value_dim)), b, a
        per_key = g.value_heads // g.key_heads
        qkvz, ba = (t.unflatten(-1, (g.key_heads, -1)) for t in projected)
        widths = [g.key_dim, g.key_dim, per_key * g.value_dim, per_key * g.value_dim]
        q, k, v, z = qkvz.split(widths, dim=-1)
        b, a = ba.split(per_key, dim=-1)
        qkv = torch.cat([t.flatten(-2) for t in (q, k, v)], dim=-1)
        return qkv, z.reshape(*z.shape[:2], -1, g.value_dim), b.flatten(-2), a.flatten(-2)

    def _convolve(self, qkv: Tensor, past: Tensor) -> Tensor:
        """Causal depthwise convolution over time and SiLU.

        Args:
            qkv: float32 `(b, s, channels)`. past: float32 `(b, channels, kernel - 1)`.
        """
        padded = torch.cat([past, qkv.transpose(1, 2)], dim=-1)
        weight = self._own["conv1d.weight"]
        return F.silu(F.conv1d(padded, weight, groups=weight.shape[0])).transpose(1, 2)

    def _next_conv_state(self, qkv: Tensor, past: Tensor, ctx: ForwardContext) -> Tensor:
        """The last `kernel - 1` columns before each row's padding, `(b, channels, kernel - 1)`."""
        padded = torch.cat([past, qkv.transpose(1, 2)], dim=-1)
        keep = past.shape[-1]
        if ctx.new_lengths is None:
            return padded[..., padded.shape[-1] - keep :]
        columns = ctx.new_lengths[:, None] + torch.arange(keep, device=padded.device)
        return padded.gather(-1, columns[:, None, :].expand(-1, padded.shape[1], -1))

    def _decay_and_rate(self, a: Tensor, b: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """g (log decay) and beta, float32 `(b, s, value_heads)`; both 0 at padded places, which
        leaves the state as it is."""
        g = -self._own["A_log"].exp() * F.softplus(a.float() + self._own["dt_bias"])
        beta = torch.sigmoid(b.float())
        if ctx.new_lengths is not None:
            steps = torch.arange(a.shape[1], device=a.device)
            real = (steps < ctx.new_lengths[:, None]).unsqueeze(-1)
            g, beta = g * real, beta * real
        return g, beta

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(b, s, hidden)` activations to float32 `(b, s, hidden)`."""
        geometry = self.geometry
        batch, seq = x.shape[:2]
        qkv, z, b, a = self._project(x, ctx)
        qkv = qkv.float()
        if ctx.cache is None:
            conv = qkv.new_zeros(batch, geometry.conv_channels, geometry.conv_kernel - 1)
            delta = qkv.new_zeros(batch, geometry.value_heads, geometry.key_dim, geometry.value_dim)
        else:
            conv, delta = ctx.cache.read_recurrent(self.layer, ctx)
        conv = conv.float()
        mixed = self._convolve(qkv, conv)
        widths = [geometry.key_width, geometry.key_width, geometry.value_width]
        q, k, v = mixed.split(widths, dim=-1)
        q = _unit(q.unflatten(-1, (-1, geometry.key_dim))) * geometry.key_dim**-0.5
        k = _unit(k.unflatten(-1, (-1, geometry.key_dim)))
        v = v.reshape(batch, seq, geometry.value_heads, geometry.value_dim)
        g, beta = self._decay_and_rate(a, b, ctx)
        o, delta = gated_delta_rule(q, k, v, g, beta, delta)
        if ctx.cache is not None:
            ctx.cache.write_recurrent(self.layer, self._next_conv_state(qkv, conv, ctx), delta, ctx)
        return self.out_proj.forward(self.norm.gated(o, z).flatten(-2), ctx)


def _unit(x: Tensor) -> Tensor:
    """Rows scaled to unit length: `x / sqrt(sum(x^2) + 1e-6)`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
