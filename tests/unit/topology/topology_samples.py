"""A small gated model, its plans and its tensors, for the topology tests.

Hidden size 256, heads 2/1 of 128, query interleaved with a gate: splits [512, 128, 128].
Layers 3, 7 and 11 have full attention; "11" sorts before "3".
"""

from __future__ import annotations

import copy
import json
from typing import Any

from exllamav3.topology import (
    AttentionFacts,
    ModelFacts,
    TensorMeta,
    parse_plan,
    resolve_plan,
)

PREFIX = "model.language_model.layers"
L3, L7, L11 = (f"{PREFIX}.{n}.self_attn" for n in (3, 7, 11))
QMAP = "block.attn.input"


def block(layer: str, in_features: int = 256, splits: tuple[int, int, int] = (512, 128, 128)):
    return AttentionFacts(layer, in_features, splits, (QMAP, QMAP, QMAP))


FACTS = ModelFacts(
    (block(L3), block(L7), block(L11)),
    {
        f"{PREFIX}.0.linear_attn": "gated delta net",
        "mtp.layers.0.self_attn": "MTP attention",
        "model.visual.blocks.0.attn": "vision attention",
    },
)

PLAN: dict[str, Any] = {
    "schema": "exl3_qkv_topology/1",
    "layers": [
        {"layer": L3, "variant": "fused_uniform", "K": 6, "codebook": "mcg", "scale": "always"},
        {"layer": L7, "variant": "split"},
        {
            "layer": L11,
            "variant": "split",
            "projections": [
                {"name": "q_proj", "K": 4},
                {"name": "k_proj", "K": 6, "scale": "never"},
                {"name": "v_proj", "K": 6, "codebook": "mul1"},
            ],
        },
    ],
}

ALLOCATED = {f"{layer}.{name}_proj": 5 for layer in (L3, L7, L11) for name in "qkv"}


def edited(document: dict[str, Any], edit) -> dict[str, Any]:
    """A deep copy of a document after `edit(copy)`."""
    result = copy.deepcopy(document)
    edit(result)
    return result


def text(document: object) -> str:
    return json.dumps(document)


def payload(
    key: str, in_features: int, width: int, bits: int, codebook: str, bias: bool = False
) -> dict[str, TensorMeta]:
    """Tensors of one stored EXL3 linear of padded sizes."""
    tensors = {
        f"{key}.trellis": TensorMeta((in_features // 16, width // 16, 16 * bits), "I16"),
        f"{key}.suh": TensorMeta((in_features,), "F16"),
        f"{key}.svh": TensorMeta((width,), "F16"),
        f"{key}.{codebook}": TensorMeta((), "I32"),
    }
    if bias:
        tensors[f"{key}.bias"] = TensorMeta((width,), "F16")
    return tensors


def inventory_of(topology, facts: ModelFacts = FACTS, bias: bool = False) -> dict[str, TensorMeta]:
    """Every tensor of a checkpoint of this topology, with some that are none of its business."""
    tensors = {
        "lm_head.weight": TensorMeta((512, 256), "F16"),
        **payload("mtp.layers.3.self_attn.q_proj", 256, 512, 4, "mul1"),
        **payload("model.visual.blocks.0.attn.qkv_proj", 128, 384, 6, "mul1"),
        **payload(f"{PREFIX}.0.linear_attn.in_proj_qkv", 256, 1024, 2, "mul1"),
    }
    for row in topology.rows:
        in_features = -(-facts.find(row.layer).in_features // 128) * 128
        tensors.update(payload(f"{row.layer}.o_proj", 256, 256, 2, "mul1"))
        for projection, width in zip(row.projections, row.stored_widths, strict=True):
            tensors.update(
                payload(
                    row.key(projection),
                    in_features,
                    width,
                    projection.bits,
                    projection.codebook,
                    bias,
                )
            )
    return tensors


def sample_topology(facts: ModelFacts = FACTS):
    plan = parse_plan(text(PLAN), "plan.json")
    return resolve_plan(plan, facts, "mul1", "always", ALLOCATED)
