"""The examples of docs/qkv_topology.md are what the code reads, writes and says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from topology_samples import L3, L7, L11, block, inventory_of

import exllamav3
from exllamav3.errors import TopologyError
from exllamav3.topology import (
    ModelFacts,
    TensorMeta,
    check_payload,
    check_tensor_storage,
    parse_declaration_text,
    parse_plan,
    resolve_plan,
)

PAGE = (Path(exllamav3.__file__).parents[1] / "docs" / "qkv_topology.md").read_text("utf-8")
FACTS = ModelFacts(tuple(block(layer, 5120, (12288, 1024, 1024)) for layer in (L3, L7, L11)))


def example(name: str) -> str:
    (found,) = re.findall(rf"```json {name}\n(.*?)```", PAGE, re.DOTALL)
    return found


def resolve(plan: str):
    allocated = {f"{L7}.{name}_proj": 4 for name in "qkv"}
    return resolve_plan(parse_plan(plan, "plan.json"), FACTS, "mul1", "always", allocated)


def is_documented(message: str) -> bool:
    return " ".join(message.split()) in " ".join(PAGE.split())


def test_the_documented_plan_resolves_to_the_documented_declaration():
    shown = parse_declaration_text(example("declaration"), "docs")
    assert shown.rows == resolve(example("plan")).rows
    assert json.loads(example("declaration")) == shown.to_obj()


def test_the_documented_tensor_storage_agrees_with_the_documented_declaration():
    topology = resolve(example("plan"))
    fused = type(topology)(tuple(row for row in topology.rows if row.is_fused))
    check_tensor_storage(fused, json.loads(example("tensor_storage")), "docs")


@pytest.mark.parametrize(
    ("old", "new"), [('"K": 6, "codebook": "mcg"', '"K": 9, "codebook": "mcg"'), (L7, None)]
)
def test_the_documented_plan_errors_are_what_the_code_says(old, new):
    changed = example("plan").replace(old, new or "model.layers.7.self_attn", 1)
    with pytest.raises(TopologyError) as caught:
        resolve(changed)
    assert is_documented(str(caught.value))


def test_the_documented_payload_error_is_what_the_code_says():
    topology = resolve(example("plan"))
    tensors = inventory_of(topology, FACTS)
    tensors[f"{L11}.q_proj.trellis"] = TensorMeta((320, 768, 80), "I16")
    with pytest.raises(TopologyError) as caught:
        check_payload(topology, FACTS, tensors, "out_dir")
    assert is_documented(str(caught.value))


def test_the_documented_python_runs(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan.json").write_text(example("plan"))
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/qkv_topology.md", "exec"), {})
