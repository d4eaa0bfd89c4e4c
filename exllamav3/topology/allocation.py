"""Bits per weight after the topology replaced what the allocation had planned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exllamav3.errors import TopologyError
from exllamav3.topology.facts import ModelFacts
from exllamav3.topology.json_node import show
from exllamav3.topology.resolved import ResolvedTopology, TopologyRow
from exllamav3.topology.schema import COMPONENTS, pad_to_block


@dataclass(frozen=True, slots=True)
class Allocation:
    """The rate of one linear.

    bits: K. weights: padded input width times padded output width.
    """

    bits: float
    weights: int


def apply_topology(
    topology: ResolvedTopology, facts: ModelFacts, allocated: Mapping[str, Allocation]
) -> dict[str, Allocation]:
    """Replace the allocation of q, k and v by what the topology says.

    Args:
        topology: the resolved plan.
        facts: the model's attention blocks, for the input width of fused linears.
        allocated: rates of the budgeted linears of the split model, by module key.

    Returns:
        The same map in the same order; a fused block's three entries became one under
        `<layer>.qkv_proj` at the place of q_proj, and no other linear's rate changed.

    Raises:
        TopologyError: a declared projection is not in `allocated`.
    """
    replaced: dict[str, dict[str, Allocation]] = {}
    for row in topology.rows:
        keys = [f"{row.layer}.{name}" for name in COMPONENTS]
        for key in keys:
            if key not in allocated:
                raise TopologyError(
                    f"bit allocation: {show(key)} has no entry, but the QKV topology declares it; "
                    f"the allocation must cover every projection of a declared block"
                )
        if row.is_fused:
            replaced.update({key: {} for key in keys})
            replaced[keys[0]] = _fused_entry(row, facts)
        else:
            for key, projection in zip(keys, row.projections, strict=True):
                replaced[key] = {key: Allocation(projection.bits, allocated[key].weights)}
    result: dict[str, Allocation] = {}
    for key, allocation in allocated.items():
        result.update(replaced.get(key, {key: allocation}))
    return result


def _fused_entry(row: TopologyRow, facts: ModelFacts) -> dict[str, Allocation]:
    block = facts.find(row.layer)
    if block is None:
        raise TopologyError(f"bit allocation: layer {show(row.layer)} is not in this model")
    (projection,) = row.projections
    weights = pad_to_block(block.in_features) * row.fused_width
    return {row.key(projection): Allocation(projection.bits, weights)}


def mean_bits(allocations: Iterable[Allocation]) -> float:
    """Bits per weight over linears, weighted by their padded sizes; 0.0 over none."""
    total_bits = 0.0
    total_weights = 0
    for allocation in allocations:
        total_bits += allocation.bits * allocation.weights
        total_weights += allocation.weights
    return total_bits / total_weights if total_weights else 0.0
