"""The gated feed-forward part of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.modules.context import ForwardContext
from exllamav3.modules.grouped import forward_all
from exllamav3.modules.linear import Linear, LinearKind
from exllamav3.modules.module import Module
from exllamav3.ops import gate_mul


class GatedMlp(Module):
    """`down(silu(gate(x)) * up(x))`, activations in, float32 out for the residual stream.

    Args:
        key: dotted path, e.g. `model.layers.0.mlp`.
        hidden_size, intermediate_size: widths.
        bias: whether all three linears have one.
        qbits_key: which bit setting its linears follow, "bits" or "mtp_bits".
    """

    def __init__(
        self,
        key: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        qbits_key: LinearKind = "bits",
    ) -> None:
        super().__init__(key)
        self.q_priority = 1

        def linear(name: str, inputs: int, outputs: int, label: str, group: str) -> Linear:
            return Linear(
                f"{key}.{name}",
                inputs,
                outputs,
                bias=bias,
                qmap=f"block.mlp.{label}",
                qbits_key=qbits_key,
                qgroup=f"{key}.{group}",
                out_dtype=torch.float32 if name == "down_proj" else None,
            )

        self.up_proj = linear("up_proj", hidden_size, intermediate_size, "input", "gu")
        self.gate_proj = linear("gate_proj", hidden_size, intermediate_size, "input", "gu")
        self.down_proj = linear("down_proj", intermediate_size, hidden_size, "down", "d")
        self.modules = [self.up_proj, self.gate_proj, self.down_proj]

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(b, s, hidden)` to float32 `(b, s, hidden)`."""
        up, gate = forward_all((self.up_proj, self.gate_proj), x, ctx)
        return self.down_proj.forward(gate_mul(gate, up, silu=True), ctx)
