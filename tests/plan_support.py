"""QKV topology plans of jobs on the random Llama of two blocks."""

from __future__ import annotations

import json
from pathlib import Path

from conversion_support import job_options
from exllamav3.conversion import convert

LAYER_0, LAYER_1 = "model.layers.0.self_attn", "model.layers.1.self_attn"


KEY = "exl3_qkv_topology"


def fused(layer=LAYER_0, bits=5, codebook="mcg", scale="never") -> dict:
    return {
        "layer": layer, "variant": "fused_uniform", "K": bits, "codebook": codebook, "scale": scale,
    }  # fmt: skip


def mixed(layer=LAYER_1) -> dict:
    projections = [
        {"name": "q_proj", "K": 4},
        {"name": "k_proj", "K": 6, "scale": "auto"},
        {"name": "v_proj", "codebook": "mcg"},
    ]
    return {"layer": layer, "variant": "split", "projections": projections}


def plan_file(tmp_path: Path, *rows: dict, name="plan.json", **changes) -> str:
    tmp_path.mkdir(parents=True, exist_ok=True)
    path = tmp_path / name
    path.write_text(json.dumps({"schema": "exl3_qkv_topology/1", "layers": list(rows), **changes}))
    return str(path)


def converted(source: Path, root: Path, *rows: dict, **changes) -> Path:
    return convert(job_options(source, root, **changes), plan_file(root, *rows)).out_dir
