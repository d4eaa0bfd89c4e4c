"""Whole bits per linear for a mean rate over the decoder.

Every linear starts at the floor of the wanted mean. What is left of the budget
raises whole groups (q, k and v are one group; so are gate and up) by one bit:
attention first, then gated delta nets and MLPs, in each class those nearest to
either end of the stack first. So 3.5 mixes 3 and 4: no linear goes beyond the
ceiling of the mean, and half steps are never allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BudgetedLinear:
    """One linear that shares the bit budget.

    key: tensor prefix
    weights: number of stored weights, both sides padded to 128
    group: name of the group that is raised as a whole
    priority: classes are raised from the highest number down
    layer: index of its block in the decoder stack
    """

    key: str
    weights: int
    group: str
    priority: int
    layer: int


def allocate_bits(linears: Sequence[BudgetedLinear], bits: float, layers: int) -> dict[str, int]:
    """Rate of each linear, in the order given.

    Args:
        linears: in module order, which is the last tie-breaker.
        bits: wanted mean bits per weight, 1 to 8.
        layers: length of the decoder stack.
    """
    base = math.floor(bits)
    allocated = {linear.key: base for linear in linears}
    groups: dict[str, list[BudgetedLinear]] = {}
    for linear in linears:
        groups.setdefault(linear.group, []).append(linear)

    def rank(members: list[BudgetedLinear]) -> tuple[int, int, int]:
        layer = members[0].layer
        return -max(m.priority for m in members), min(layer, layers - 1 - layer), layer

    ordered = sorted(groups.values(), key=rank)
    remaining = int(bits * sum(linear.weights for linear in linears))
    remaining -= base * sum(linear.weights for linear in linears)
    for members in ordered:
        cost = sum(member.weights for member in members)
        if base < bits and cost <= remaining:
            for member in members:
                allocated[member.key] += 1
            remaining -= cost
    return allocated


def summary_lines(bits: Iterable[tuple[str, int]]) -> list[str]:
    """Allocation for people: per rate, the keys with numbers as `*`, and how many."""
    table: dict[tuple[int, str], int] = {}
    for key, rate in bits:
        shape = ".".join("*" if part.isdigit() else part for part in key.split("."))
        table[rate, shape] = table.get((rate, shape), 0) + 1
    return [f"{rate} bits  {count:4d} x {shape}" for (rate, shape), count in sorted(table.items())]
