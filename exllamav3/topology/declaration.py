"""The declaration: what a checkpoint says about its own q, k and v.

The functions here prove a declaration well formed, on its own. Whether it describes
a particular model and its tensors is what `validate_declaration` proves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from exllamav3.topology.json_node import Node, read_json, show, show_list
from exllamav3.topology.plan import check_schema, named_projections, parse_layer_and_variant
from exllamav3.topology.resolved import Projection, TopologyRow, declaration_obj
from exllamav3.topology.schema import (
    CODEBOOKS,
    COMPONENTS,
    CONFIG_PATH,
    FUSED,
    FUSED_NAME,
    MAX_BITS,
    MAX_WIDTH,
    METADATA_KEY,
    MIN_BITS,
    SCALES,
)

_ROW = ("layer", "variant", "components", "output_splits")
_PROJECTION = ("name", "K", "codebook", "scale")
_ADVICE = "The declaration was not written by this converter or was edited; restore the original."


@dataclass(frozen=True, slots=True)
class Declaration:
    """A well-formed declaration, not yet compared with any model.

    where, path: file and JSON path it came from, for errors; not part of the content.
    """

    rows: tuple[TopologyRow, ...]
    where: str = field(default="declaration", compare=False)
    path: str = field(default="", compare=False)

    def to_obj(self) -> dict[str, object]:
        """The declaration as a JSON object."""
        return declaration_obj(self.rows)

    def node(self, index: int | None = None) -> Node:
        """Where the declaration, or one of its rows, stands."""
        root = Node(self.to_obj(), self.where, self.path)
        if index is None:
            return root
        path = f"{self.path}.layers[{index}]" if self.path else f"layers[{index}]"
        layer = self.rows[index].layer
        return Node(self.rows[index].to_obj(), self.where, path, f"layer {show(layer)}")


def parse_declaration(value: object, where: str, path: str = "") -> Declaration:
    """Parse a declaration from JSON values that are already decoded.

    Duplicate keys are no longer visible in decoded JSON; from a whole config.json use
    `declaration_in_config`.

    Args:
        value: the object under `exl3_qkv_topology`.
        where: name of the file, for errors.
        path: JSON path of the value in it.

    Raises:
        TopologyError: not a declaration of schema `exl3_qkv_topology/1`.
    """
    return _parse(Node(value, where, path))


def parse_declaration_text(text: str | bytes, where: str, path: str = "") -> Declaration:
    """Parse a declaration from JSON text, such as a shard header carries.

    Raises:
        TopologyError: not JSON, or not a declaration of schema `exl3_qkv_topology/1`.
    """
    place = f"{where}, {path}" if path else where
    return _parse(Node(read_json(text, place).value, where, path))


def declaration_in_config(text: str | bytes, where: str = "config.json") -> Declaration | None:
    """Find and parse the authoritative declaration, in the text of a config.json.

    Returns:
        The declaration under `quantization_config.exl3_qkv_topology`, None if that key is absent.

    Raises:
        TopologyError: the text is not strict JSON, the declaration is malformed, or it stands at
            the root, where it would be overlooked.
    """
    root = read_json(text, where, allow_nan=True)
    members = root.mapping()
    if METADATA_KEY in members:
        raise root.error(
            f"{show(METADATA_KEY)} stands at the root, expected it at {CONFIG_PATH}",
            "Move it there; only quantization_config.json has it at its root.",
        )
    section = members.get("quantization_config")
    if not isinstance(section, dict) or METADATA_KEY not in section:
        return None
    return _parse(root.member("quantization_config").member(METADATA_KEY))


def _parse(root: Node) -> Declaration:
    members = root.members(("schema", "layers"), advice=_ADVICE)
    check_schema(members["schema"])
    rows: list[TopologyRow] = []
    for node in members["layers"].array(_ADVICE):
        row = _parse_row(node)
        if rows and row.layer == rows[-1].layer:
            raise node.error(f"layer {show(row.layer)} has two rows", _ADVICE)
        if rows and row.layer < rows[-1].layer:
            raise node.error(
                f"layer {show(row.layer)} comes after {show(rows[-1].layer)}, expected rows in "
                f"plain string order of the layer, each layer once",
                _ADVICE,
            )
        rows.append(row)
    return Declaration(tuple(rows), root.where, root.path)


def _parse_row(node: Node) -> TopologyRow:
    layer, variant, node = parse_layer_and_variant(node)
    if variant == FUSED:
        members = node.members((*_ROW, "projection"), advice=_ADVICE)
        item = members["projection"]
        found = item.member("name")
        if found.value != FUSED_NAME:
            raise found.error(f"name is {show(found.value)}, expected {show(FUSED_NAME)}", _ADVICE)
        projections: tuple[Projection, ...] = (_parse_projection(FUSED_NAME, item),)
    else:
        members = node.members((*_ROW, "projections"), advice=_ADVICE)
        projections = tuple(
            _parse_projection(name, item)
            for name, item in named_projections(members["projections"])
        )
    _check_components(members["components"])
    return TopologyRow(layer, _parse_splits(members["output_splits"]), projections)


def _check_components(node: Node) -> None:
    found = [item.value for item in node.array(_ADVICE)]
    if found != list(COMPONENTS):
        raise node.error(
            f"components are {show_list(found, 9)}, expected exactly {show_list(COMPONENTS)} in "
            f"this order",
            _ADVICE,
        )


def _parse_splits(node: Node) -> tuple[int, int, int]:
    items = node.array(_ADVICE)
    if len(items) != len(COMPONENTS):
        raise node.error(
            f"output_splits has {len(items)} entries, expected the unpadded output widths of "
            f"{show_list(COMPONENTS)}",
            _ADVICE,
        )
    q, k, v = (item.integer(1, MAX_WIDTH, _ADVICE) for item in items)
    return q, k, v


def _parse_projection(name: str, node: Node) -> Projection:
    members = node.members(_PROJECTION, advice=_ADVICE)
    return Projection(
        name,
        members["K"].integer(MIN_BITS, MAX_BITS, _ADVICE),
        members["codebook"].choice(CODEBOOKS, _ADVICE),
        members["scale"].choice(SCALES, _ADVICE),
    )
