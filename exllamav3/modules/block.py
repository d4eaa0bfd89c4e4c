"""One decoder block: mixing over time, then over features, each around a residual."""

from __future__ import annotations

from torch import Tensor

from exllamav3.modules.attention import Attention
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.gated_delta_net import GatedDeltaNet
from exllamav3.modules.mlp import GatedMlp
from exllamav3.modules.module import Module
from exllamav3.modules.norm import RMSNorm


class TransformerBlock(Module):
    """`x + attn(norm(x))`, then `x + mlp(norm(x))`.

    Args:
        key: dotted path, e.g. `model.layers.0`.
        attn_norm, attn, mlp_norm, mlp: its parts, loaded and saved in this order.
    """

    def __init__(
        self,
        key: str,
        attn_norm: RMSNorm,
        attn: Attention | GatedDeltaNet,
        mlp_norm: RMSNorm,
        mlp: GatedMlp,
    ) -> None:
        super().__init__(key)
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp
        self.modules = [attn_norm, attn, mlp_norm, mlp]

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """The residual stream, float32 `(b, s, hidden)`, in and out."""
        x = x + self.attn.forward(self.attn_norm.forward(x, ctx), ctx)
        return x + self.mlp.forward(self.mlp_norm.forward(x, ctx), ctx)
