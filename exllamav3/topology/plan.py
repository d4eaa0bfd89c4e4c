"""The plan: what a user asks the converter to do with q, k and v of each block."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from exllamav3.errors import TopologyError
from exllamav3.topology.json_node import Node, read_json, show, show_list
from exllamav3.topology.schema import (
    CODEBOOKS,
    COMPONENTS,
    FUSED,
    FUSED_NAME,
    MAX_BITS,
    MIN_BITS,
    SCALES,
    SCHEMA,
    SPLIT,
    VARIANTS,
)

_SETTINGS = ("K", "codebook", "scale")
_SPLIT_SETTINGS = (
    'Settings of a split block are stated per projection: "projections": [{"name": "q_proj", '
    '"K": 4}, {"name": "k_proj"}, {"name": "v_proj"}].'
)
_FUSED_SETTINGS = (
    "A fused block is one matrix with one K, codebook and scale; use the variant split to give "
    "each projection its own."
)
_ROOT = f'A plan is an object: {{"schema": {show(SCHEMA)}, "layers": [...]}}.'


@dataclass(frozen=True, slots=True)
class PlannedProjection:
    """What a plan states for one linear; None where the job decides.

    bits: K, 3..8; codebook: "mcg" or "mul1"; scale: "always", "never" or "auto".
    """

    name: str
    bits: int | None = None
    codebook: str | None = None
    scale: str | None = None

    def settings(self) -> dict[str, object]:
        """The stated settings under their JSON keys."""
        stated = {"K": self.bits, "codebook": self.codebook, "scale": self.scale}
        return {key: value for key, value in stated.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One block of a plan.

    projections: three for a split block that states settings, none for a split block
        that states nothing, one called qkv_proj (complete) for a fused block.
    index: position in the plan's file, for errors; not part of the content.
    """

    layer: str
    variant: str
    projections: tuple[PlannedProjection, ...] = ()
    index: int = field(default=0, compare=False)

    @property
    def is_fused(self) -> bool:
        return self.variant == FUSED

    def to_obj(self) -> dict[str, object]:
        """The row as a JSON object."""
        row: dict[str, object] = {"layer": self.layer, "variant": self.variant}
        if self.is_fused:
            row.update(self.projections[0].settings())
        elif self.projections:
            row["projections"] = [{"name": p.name, **p.settings()} for p in self.projections]
        return row


@dataclass(frozen=True, slots=True)
class Plan:
    """A well-formed plan, not yet compared with any model.

    Rows are sorted by layer, and neither the file's name nor the order of its rows
    counts: plans that ask for the same rows are equal.

    where: name of the file, for errors.
    """

    rows: tuple[PlanRow, ...]
    where: str = field(default="plan", compare=False)

    def to_obj(self) -> dict[str, object]:
        """The plan as a JSON object, rows sorted by layer."""
        return {"schema": SCHEMA, "layers": [row.to_obj() for row in self.rows]}

    def to_json(self) -> str:
        """The canonical content: compact, sorted keys; parses to an equal plan."""
        return json.dumps(self.to_obj(), sort_keys=True, separators=(",", ":"))

    def node(self, row: PlanRow) -> Node:
        """Where a row stands, for errors found after parsing."""
        return Node(row.to_obj(), self.where, f"layers[{row.index}]")


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        TopologyError: the file cannot be read, or `parse_plan` refuses its content.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise TopologyError(
            f"{path}: the QKV topology plan cannot be read ({error}). Check the path."
        ) from error
    return parse_plan(content, str(path))


def parse_plan(text: str | bytes, where: str) -> Plan:
    """Parse a plan strictly.

    Args:
        text: the JSON document.
        where: name of the file, for errors.

    Raises:
        TopologyError: not JSON, or not a plan of schema `exl3_qkv_topology/1`.
    """
    root = read_json(text, where).members(("schema", "layers"), advice=_ROOT)
    check_schema(root["schema"])
    rows: dict[str, PlanRow] = {}
    for index, node in enumerate(root["layers"].array()):
        row = _parse_row(node, index)
        if row.layer in rows:
            raise node.error(
                f"layer {show(row.layer)} is listed twice, first in layers"
                f"[{rows[row.layer].index}]",
                "Keep one of the two rows.",
            )
        rows[row.layer] = row
    return Plan(tuple(rows[layer] for layer in sorted(rows)), where)


def check_schema(node: Node) -> None:
    """Refuse every schema but ours."""
    if node.value != SCHEMA:
        raise node.error(
            f"schema is {show(node.value)}, expected {show(SCHEMA)}",
            "This version reads no other schema.",
        )


def parse_layer_and_variant(node: Node) -> tuple[str, str, Node]:
    """Read what every row has; the returned node names the layer in its errors."""
    layer = node.member("layer").string("Name the full dotted path of an attention module.")
    node = node.about(f"layer {show(layer)}")
    return layer, node.member("variant").choice(VARIANTS), node


def _parse_row(node: Node, index: int) -> PlanRow:
    layer, variant, node = parse_layer_and_variant(node)
    if variant == FUSED:
        if "projections" in node.mapping():
            raise node.error('a fused_uniform row has the key "projections"', _FUSED_SETTINGS)
        members = node.members(("layer", "variant", *_SETTINGS), advice=_FUSED_SETTINGS)
        return PlanRow(layer, variant, (_parse_settings(FUSED_NAME, members),), index)
    for key in _SETTINGS:
        if key in node.mapping():
            raise node.error(f"a split row has {show(key)} at its top level", _SPLIT_SETTINGS)
    members = node.members(("layer", "variant"), ("projections",))
    projections: tuple[PlannedProjection, ...] = ()
    if "projections" in members:
        projections = tuple(
            _parse_settings(name, item.members(("name",), _SETTINGS))
            for name, item in named_projections(members["projections"])
        )
    return PlanRow(layer, SPLIT, projections, index)


def named_projections(node: Node) -> list[tuple[str, Node]]:
    """Read an array of objects named q_proj, k_proj, v_proj, in that order."""
    advice = f"Give exactly {show_list(COMPONENTS)}, in this order."
    items = node.array(advice)
    for item, name in zip(items, COMPONENTS, strict=False):
        found = item.member("name")
        if found.value != name:
            raise found.error(f"name is {show(found.value)}, expected {show(name)}", advice)
    if len(items) != len(COMPONENTS):
        raise node.error(f"projections has {len(items)} entries, expected 3", advice)
    return list(zip(COMPONENTS, items, strict=True))


def _parse_settings(name: str, members: dict[str, Node]) -> PlannedProjection:
    advice = _FUSED_SETTINGS if name == FUSED_NAME else ""
    return PlannedProjection(
        name,
        members["K"].integer(MIN_BITS, MAX_BITS, advice) if "K" in members else None,
        members["codebook"].choice(CODEBOOKS, advice) if "codebook" in members else None,
        members["scale"].choice(SCALES, advice) if "scale" in members else None,
    )
