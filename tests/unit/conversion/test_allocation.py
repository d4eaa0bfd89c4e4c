"""Bit allocation: budget, priorities, groups."""

from __future__ import annotations

import pytest
from exllamav3.conversion.allocation import (
    BudgetedLinear,
    allocate_bits,
    summary_lines,
)
from hypothesis import given
from hypothesis import strategies as st

from exllamav3.codec.bit_rate import bit_rate


def decoder(layers: int, attention: int = 4, mlp: int = 8) -> list[BudgetedLinear]:
    """Blocks of q, k, v (one group), o, gate and up (one group), and down."""
    made = []
    for layer in range(layers):
        block = f"layers.{layer}"
        for name, weights, group, priority in (
            ("q", attention, "qkv", 2),
            ("k", 1, "qkv", 2),
            ("v", 1, "qkv", 2),
            ("o", attention, "o", 2),
            ("up", mlp, "gu", 1),
            ("gate", mlp, "gu", 1),
            ("down", mlp, "d", 1),
        ):
            made.append(
                BudgetedLinear(f"{block}.{name}", weights, f"{block}.{group}", priority, layer)
            )
    return made


def mean(linears: list[BudgetedLinear], bits: dict[str, int]) -> float:
    return bit_rate((linear.key, linear.weights, bits[linear.key]) for linear in linears).decoder


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_whole_rate_gives_every_linear_that_rate(bits):
    assert set(allocate_bits(decoder(3), bits, 3).values()) == {bits}


def test_three_and_a_half_mixes_threes_and_fours_and_writes_no_half_step():
    linears = decoder(4)
    bits = allocate_bits(linears, 3.5, 4)
    assert set(bits.values()) == {3, 4}
    assert mean(linears, bits) <= 3.5
    assert all(isinstance(rate, int) for rate in bits.values())


def test_members_of_a_group_always_have_the_same_rate():
    bits = allocate_bits(decoder(5), 4.3, 5)
    for layer in range(5):
        assert len({bits[f"layers.{layer}.{name}"] for name in "qkv"}) == 1
        assert bits[f"layers.{layer}.up"] == bits[f"layers.{layer}.gate"]


def test_attention_is_raised_before_the_mlp():
    linears = decoder(3)
    weights = sum(linear.weights for linear in linears)
    attention = sum(linear.weights for linear in linears if linear.priority == 2)
    bits = allocate_bits(linears, 3 + attention / weights, 3)
    assert {bits[linear.key] for linear in linears if linear.priority == 2} == {4}
    assert {bits[linear.key] for linear in linears if linear.priority == 1} == {3}


def test_blocks_at_either_end_are_raised_before_those_in_the_middle():
    linears = decoder(5)
    weights = sum(linear.weights for linear in linears)
    bits = allocate_bits(linears, 4 + 20 / weights, 5)
    raised = {key.split(".")[1] for key, rate in bits.items() if rate == 5}
    assert raised == {"0", "4"}


def test_no_rate_exceeds_eight():
    assert set(allocate_bits(decoder(2), 7.99, 2).values()) == {7, 8}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.floats(1, 8, allow_nan=False),
)
def test_the_budget_is_never_exceeded_and_nothing_that_fits_is_left(sizes, wanted):
    linears = [BudgetedLinear(f"l{i}", size, f"g{i}", i % 3, i) for i, size in enumerate(sizes)]
    bits = allocate_bits(linears, wanted, len(sizes))
    spent = sum(linear.weights * bits[linear.key] for linear in linears)
    budget = int(wanted * sum(sizes))
    assert spent <= budget
    base = int(wanted)
    assert set(bits.values()) <= {base, base + 1}
    if base < wanted:
        left = [linear.weights for linear in linears if bits[linear.key] == base]
        assert all(size > budget - spent for size in left)


def test_the_summary_groups_layers():
    lines = summary_lines([("m.layers.0.q", 4), ("m.layers.1.q", 4), ("m.layers.0.o", 5)])
    assert lines == ["4 bits     2 x m.layers.*.q", "5 bits     1 x m.layers.*.o"]
