"""Schemas of every operator, one line each; implementations are registered elsewhere.

Importing this module alone makes the names under `torch.ops.exllamav3` exist.
Codebook numbers: 0 = 3inst, 1 = mcg, 2 = mul1. Shapes are described in
`exllamav3/ops`, whose functions are the public face of the operators.
"""

from __future__ import annotations

from torch.library import Library

NAMESPACE = "exllamav3"

SCHEMAS = (
    # codec
    "pack(Tensor states, float bits) -> Tensor",
    "unpack(Tensor trellis) -> Tensor",
    "decode(Tensor trellis, int codebook) -> Tensor",
    "reconstruct(Tensor trellis, Tensor suh, Tensor svh, int codebook, ScalarType dtype) -> Tensor",
    "reconstruct_columns(Tensor trellis, Tensor suh, Tensor svh, int codebook) -> Tensor",
    "rotate_input(Tensor x, Tensor suh) -> Tensor",
    "hadamard(Tensor x, Tensor? pre_scale, Tensor? post_scale) -> Tensor",
    # search
    "quantize_tiles(Tensor tiles, int bits, int codebook) -> (Tensor, Tensor)",
    # packed linear
    "linear(Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor? bias, int codebook,"
    " ScalarType out_dtype) -> Tensor",
    "linear_group(Tensor x, Tensor[] trellis, Tensor[] suh, Tensor[] svh, int[] codebooks,"
    " ScalarType out_dtype) -> Tensor[]",
    # attention and gated delta net
    "deinterleave_qg(Tensor qg, int head_dim) -> (Tensor, Tensor)",
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state)"
    " -> (Tensor, Tensor)",
    "advance_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states,"
    " Tensor slots, Tensor is_new) -> Tensor",
    # small steps between the linears
    "rms_norm(Tensor x, Tensor scale, float eps, Tensor? gate, ScalarType out_dtype) -> Tensor",
    "norm_rotate(Tensor x, Tensor? scale, float eps, Tensor cos, Tensor sin) -> Tensor",
    "gate_mul(Tensor gate, Tensor x, bool silu) -> Tensor",
    "delta_inputs(Tensor qkv, Tensor past, Tensor weight, Tensor a, Tensor b, Tensor decay_log,"
    " Tensor time_bias, Tensor? lengths, int key_heads, int key_dim)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    # about the build
    "build_info() -> str",
)

library = Library(NAMESPACE, "DEF")
"""Kept alive at module level: its schemas vanish with it."""

for _schema in SCHEMAS:
    library.define(_schema)
