"""Imports go downwards only, as docs/architecture.md says."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "errors": 0,
    "util": 0,
    "ops": 1,
    "codec": 2,
    "topology": 2,
    "checkpoint": 3,
    "quant": 3,
    "modules": 4,
    "cache": 4,
    "model": 5,
    "architecture": 5,
    "tokenizer": 6,
    "generator": 6,
    "evaluation": 6,
    "conversion": 6,
    "cli": 7,
    "__main__": 7,
}
STRANGERS = {
    # Packages that must not know each other although the numbers would allow it.
    ("checkpoint", "quant"),
    ("quant", "checkpoint"),
    ("modules", "checkpoint"),
    ("modules", "quant"),
    ("modules", "cache"),
    ("cache", "checkpoint"),
    ("cache", "quant"),
    ("codec", "topology"),
    ("generator", "conversion"),
    ("conversion", "generator"),
}


def sources():
    for path in sorted((ROOT / "exllamav3").rglob("*.py")):
        parts = path.relative_to(ROOT / "exllamav3").with_suffix("").parts
        if parts != ("__init__",):  # the public names, loaded on first use
            yield parts[0], path
    for path in sorted((ROOT / "conversion").rglob("*.py")):
        yield "conversion", path


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 1:  # stays in its own package
                continue
            assert node.level == 0, f"{path}: an import relative to another package"
            yield from (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "exllamav3"
                else [node.module]
            )


def test_every_package_has_a_layer():
    assert {package for package, _ in sources()} <= LAYERS.keys()


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_downwards_only(package):
    for owner, path in sources():
        if owner != package:
            continue
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] != "exllamav3" or len(parts) < 2 or parts[1] not in LAYERS:
                continue
            target = parts[1]
            where = f"{path.relative_to(ROOT)} imports {name}"
            assert LAYERS[target] <= LAYERS[package], where
            assert (package, target) not in STRANGERS, where


def test_the_topology_package_needs_only_the_standard_library():
    allowed = {"exllamav3", *sys.stdlib_module_names}
    for owner, path in sources():
        if owner == "topology":
            for name in imported_modules(path):
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                if name.startswith("exllamav3."):
                    assert name.split(".")[1] in ("errors", "topology"), f"{path.name}: {name}"


def test_the_extension_package_knows_nothing_of_the_library():
    for path in sorted((ROOT / "exllamav3_ext").rglob("*.py")):
        for name in imported_modules(path):
            assert name.split(".")[0] != "exllamav3", f"{path.name} imports {name}"
