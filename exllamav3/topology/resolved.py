"""The resolved topology: how every full-attention block of one model is stored."""

from __future__ import annotations

import json
from dataclasses import dataclass

from exllamav3.topology.schema import (
    COMPONENTS,
    FUSED,
    FUSED_NAME,
    SCHEMA,
    SPLIT,
    pad_to_block,
)


@dataclass(frozen=True, slots=True)
class Projection:
    """One quantized linear: K (3..8), codebook ("mcg", "mul1"), scale policy."""

    name: str
    bits: int
    codebook: str
    scale: str

    def to_obj(self) -> dict[str, object]:
        """The projection as a JSON object."""
        return {
            "name": self.name,
            "K": self.bits,
            "codebook": self.codebook,
            "scale": self.scale,
        }


@dataclass(frozen=True, slots=True)
class TopologyRow:
    """One full-attention block.

    layer: full dotted path of the attention module.
    output_splits: unpadded output widths of q, k, v (a gate interleaved with q included).
    projections: q_proj, k_proj, v_proj of a split block, or one qkv_proj of a fused block.
    """

    layer: str
    output_splits: tuple[int, int, int]
    projections: tuple[Projection, ...]

    @property
    def is_fused(self) -> bool:
        return self.projections[0].name == FUSED_NAME

    @property
    def variant(self) -> str:
        """ "fused_uniform" or "split"."""
        return FUSED if self.is_fused else SPLIT

    @property
    def fused_width(self) -> int:
        """Stored output width of the fused linear: the summed splits, padded once at the end."""
        return pad_to_block(sum(self.output_splits))

    @property
    def stored_widths(self) -> tuple[int, ...]:
        """Padded output width of each projection, a multiple of 128."""
        if self.is_fused:
            return (self.fused_width,)
        return tuple(pad_to_block(width) for width in self.output_splits)

    def key(self, projection: Projection) -> str:
        """Module key of a projection, `<layer>.<name>`."""
        return f"{self.layer}.{projection.name}"

    def absent_keys(self) -> tuple[str, ...]:
        """Module keys of the other topology, under which nothing may be stored."""
        names = COMPONENTS if self.is_fused else (FUSED_NAME,)
        return tuple(f"{self.layer}.{name}" for name in names)

    def to_obj(self) -> dict[str, object]:
        """The row as a JSON object of the declaration."""
        row: dict[str, object] = {
            "layer": self.layer,
            "variant": self.variant,
            "components": list(COMPONENTS),
            "output_splits": list(self.output_splits),
        }
        if self.is_fused:
            row["projection"] = self.projections[0].to_obj()
        else:
            row["projections"] = [projection.to_obj() for projection in self.projections]
        return row


@dataclass(frozen=True, slots=True)
class ResolvedTopology:
    """The topology of one model, proven to describe it.

    Only `resolve_plan` and `validate_declaration` make one outside of tests, which is why
    modules and converter accept this type and no other.

    rows: one for every full-attention block of the text decoder, in plain string order.
    """

    rows: tuple[TopologyRow, ...]

    def row(self, layer: str) -> TopologyRow | None:
        """The row of a block, or None for whatever the declaration does not cover."""
        return next((row for row in self.rows if row.layer == layer), None)

    def is_fused(self, layer: str) -> bool:
        """Whether the block of that path stores one qkv_proj."""
        row = self.row(layer)
        return row is not None and row.is_fused

    def first_fused(self) -> str | None:
        """Path of the first fused block in row order, or None if all are split."""
        return next((row.layer for row in self.rows if row.is_fused), None)

    def projections(self) -> dict[str, Projection]:
        """Module key of every declared linear, with its settings, in row order."""
        return {row.key(p): p for row in self.rows for p in row.projections}

    def projection(self, key: str) -> Projection | None:
        """The settings of a linear by its module key, or None for undeclared linears."""
        return self.projections().get(key)

    def to_obj(self) -> dict[str, object]:
        """The declaration as a JSON object."""
        return declaration_obj(self.rows)

    def to_compact_json(self) -> str:
        """The declaration as stored in shard headers: compact JSON with sorted keys, ASCII."""
        return json.dumps(self.to_obj(), sort_keys=True, separators=(",", ":"))


def declaration_obj(rows: tuple[TopologyRow, ...]) -> dict[str, object]:
    """The JSON object of a declaration with these rows."""
    return {"schema": SCHEMA, "layers": [row.to_obj() for row in rows]}
