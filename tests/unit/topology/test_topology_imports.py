"""The topology package works where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import exllamav3

PROGRAM = """
import sys

BLOCKED = {"torch", "numpy", "safetensors", "tokenizers", "rich", "jinja2"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
import exllamav3.topology as topology

plan = topology.parse_plan('{"schema": "exl3_qkv_topology/1", "layers": []}', "plan.json")
block = topology.AttentionFacts("a", 128, (128, 128, 128), ("q", "q", "q"))
keys = {f"a.{name}": 4 for name in topology.COMPONENTS}
resolved = topology.resolve_plan(plan, topology.ModelFacts((block,)), "mcg", "auto", keys)
assert topology.parse_declaration_text(resolved.to_compact_json(), "shard").rows == resolved.rows
print(sorted(name for name in sys.modules if name.startswith("exllamav3.")
             and not name.startswith("exllamav3.topology")))
"""


def test_topology_imports_only_the_standard_library_and_errors():
    root = Path(exllamav3.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['exllamav3.errors']"
