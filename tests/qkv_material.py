"""Split and fused projections of random payloads, and what they compute by definition."""

import torch
from tiny_models import exact_weight, random_exl3

from exllamav3.modules.attention import Attention
from exllamav3.modules.module import DictSource
from exllamav3.modules.qkv import COMPONENTS, FusedQkv, QkvGeometry, SplitQkv
from exllamav3.modules.rope import Rope, RopeSettings

KEY = "model.layers.3.self_attn"
GATED = QkvGeometry(256, heads=3, kv_heads=1, head_dim=64, gated=True)
PLAIN = QkvGeometry(576, heads=9, kv_heads=3, head_dim=64, bias=True)  # as in SmolLM2
REAL = QkvGeometry(256, heads=24, kv_heads=4, head_dim=256, gated=True)  # as in Qwen3.5


def stored(geometry, fused, rates=(4, 6, 3), codebooks=("mul1", "mcg", "mul1")):
    hidden, splits = geometry.hidden_size, geometry.output_splits
    if fused:
        return random_exl3(f"{KEY}.qkv_proj", hidden, sum(splits), bias=geometry.bias)
    tensors = {}
    for n, (name, width) in enumerate(zip(COMPONENTS, splits, strict=True)):
        tensors |= random_exl3(
            f"{KEY}.{name}",
            hidden,
            width,
            bits=rates[n],
            codebook=codebooks[n],
            seed=n,
            bias=geometry.bias,
        )
    return tensors


def projection(geometry, fused, dtype, device="cpu"):
    qkv = (FusedQkv if fused else SplitQkv)(KEY, geometry)
    tensors = stored(geometry, fused)
    for linear in qkv.linears:
        linear.load(DictSource(tensors), device, dtype)
    return qkv


def decoded(qkv):
    """Weights and biases of q, k, v in float64, `(hidden, all columns)` and `(all columns)`."""
    weights, biases = [], []
    for linear in qkv.linears:
        rows, columns = linear.in_features, linear.out_features
        weight = linear.weight.to("cpu")
        weights.append(exact_weight(weight)[:rows, :columns])
        bias = weight.bias_N
        biases.append(torch.zeros(columns) if bias is None else bias[:columns])
    return torch.cat(weights, 1), torch.cat(biases).double()


def cut(y, geometry):
    """q, k, v, gate of whole rows, by the definition of the layout."""
    q, k, v = y.split(geometry.output_splits, dim=-1)
    heads = (*y.shape[:2], -1, geometry.head_dim)
    if not geometry.gated:
        return q.reshape(heads), k.reshape(heads), v.reshape(heads), None
    pairs = q.reshape(*y.shape[:2], geometry.heads, 2, geometry.head_dim)
    return pairs[..., 0, :], k.reshape(heads), v.reshape(heads), pairs[..., 1, :].flatten(-2)


def make_attention(geometry, fused, dtype=torch.float32, device="cpu"):
    rope = Rope(RopeSettings(theta=10000.0, rotary_dim=geometry.head_dim // 4))
    attention = Attention(KEY, 3, geometry, rope, qk_norm=(1e-6, 1.0), fused=fused)
    tensors = stored(geometry, fused)
    width = geometry.heads * geometry.head_dim
    random = torch.Generator().manual_seed(7)
    o_proj = torch.randn(geometry.hidden_size, width, generator=random) * width**-0.5
    tensors[f"{KEY}.o_proj.weight"] = o_proj.half()
    for name in ("q_norm", "k_norm"):
        tensors[f"{KEY}.{name}.weight"] = torch.zeros(geometry.head_dim)
    attention.load(DictSource(tensors), device, dtype)
    return attention
