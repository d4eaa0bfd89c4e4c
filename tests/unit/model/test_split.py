"""The plan of a layer split: sizes in, devices out."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exllamav3.errors import UnsupportedError
from exllamav3.model.split import GIB, Part, Room, split_by_limits, split_evenly


def parts_of(*gib, cache=0.0):
    return [Part(f"part {n}", int(size * GIB), int(cache * GIB)) for n, size in enumerate(gib)]


def rooms_of(*gib):
    return [Room(f"cuda:{n}", int(size * GIB)) for n, size in enumerate(gib)]


MODEL = parts_of(1, *[0.5] * 12, 0, 2)
"""Embedding, 12 blocks, a norm of no size, and a head: 9 GiB."""


def test_equal_devices_get_equal_halves_in_the_order_of_the_model():
    assert split_evenly(MODEL, rooms_of(24, 24)) == [0] * 8 + [1] * 7  # 4.5 GiB each
    assert split_evenly(MODEL, rooms_of(24, 24, 24)) == [0] * 5 + [1] * 6 + [2] * 4  # 3 GiB
    assert split_evenly(MODEL, rooms_of(24)) == [0] * 15


def test_a_device_with_twice_the_memory_gets_twice_the_modules():
    assert split_evenly(MODEL, rooms_of(21, 11)) == [0] * 11 + [1] * 4  # 6 and 3 GiB


def test_a_device_without_free_memory_gets_nothing():
    assert split_evenly(MODEL, rooms_of(0.5, 24)) == [1] * 15
    assert split_evenly(MODEL, rooms_of(24, 1)) == [0] * 15


def test_caches_count_as_much_as_weights():
    parts = [Part("a", GIB, 4 * GIB), Part("b", GIB), Part("c", GIB), Part("d", 3 * GIB)]
    assert split_evenly(parts, rooms_of(20, 20)) == [0, 1, 1, 1]
    weights_alone = [Part(part.key, part.weight_bytes) for part in parts]
    assert split_evenly(weights_alone, rooms_of(20, 20)) == [0, 0, 0, 1]


def test_a_gibibyte_stays_free_on_each_device():
    parts = parts_of(2, 2)
    assert split_evenly(parts, rooms_of(3, 3)) == [0, 1]
    with pytest.raises(UnsupportedError, match="does not fit"):
        split_evenly(parts, [Room("cuda:0", 3 * GIB), Room("cuda:1", 3 * GIB - 1)])


def test_what_does_not_fit_is_told_device_by_device():
    with pytest.raises(UnsupportedError) as refused:
        split_evenly(parts_of(4, 4, 4, cache=0.5), rooms_of(8, 6))
    assert str(refused.value).startswith(
        "devices: the model does not fit, weights of 12.00 GiB and caches of 1.50 GiB: cuda:0 "
        "needs 9.00 GiB, has 7.00 GiB; cuda:1 needs 4.50 GiB, has 5.00 GiB (1.00 GiB of each "
    )


def test_limits_fill_one_device_after_the_other():
    assert split_by_limits(MODEL, rooms_of(24, 24), [3 * GIB, 9 * GIB]) == [0] * 5 + [1] * 10
    assert split_by_limits(MODEL, rooms_of(24, 24), [9 * GIB, 9 * GIB]) == [0] * 15
    assert split_by_limits(MODEL, rooms_of(24, 24), [0, 9 * GIB]) == [1] * 15
    three = split_by_limits(MODEL, rooms_of(24, 24, 24), [GIB, 5 * GIB, 3 * GIB])
    assert three == [0] + [1] * 10 + [2] * 4


def test_limits_that_are_too_small_name_what_has_no_place():
    with pytest.raises(UnsupportedError) as refused:
        split_by_limits(MODEL, rooms_of(24, 24), [int(3.2 * GIB), int(5.5 * GIB)])
    assert str(refused.value).startswith(
        "use_per_device: too little for weights of 9.00 GiB: cuda:0 takes 3.00 GiB of 3.20 GiB; "
        "cuda:1 takes 4.00 GiB of 5.50 GiB; no place for part 14 and what follows, 2.00 GiB."
    )


def test_limits_beyond_the_memory_of_a_device_are_refused():
    with pytest.raises(UnsupportedError, match=r"cuda:0 needs 9\.00 GiB, has 8\.00 GiB"):
        split_by_limits(MODEL, rooms_of(8, 24), [10 * GIB, 10 * GIB])
    cached = [Part("a", GIB, 8 * GIB)]
    with pytest.raises(UnsupportedError, match=r"caches of 8\.00 GiB.*has 8\.00 GiB"):
        split_by_limits(cached, rooms_of(8), [10 * GIB])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=7),
    st.lists(st.integers(0, 80), min_size=1, max_size=3),
)
def test_no_other_cut_leaves_the_fullest_device_emptier(costs, capacities):
    parts = [Part(str(n), cost) for n, cost in enumerate(costs)]
    rooms = [Room(f"cuda:{n}", capacity) for n, capacity in enumerate(capacities)]

    def fullest(places):
        shares = []
        for device, capacity in enumerate(capacities):
            need = sum(c for c, place in zip(costs, places, strict=True) if place == device)
            shares.append(need / capacity if capacity else float("inf") if need else 0.0)
        return max(shares)

    cuts = combinations_with_replacement(range(len(rooms)), len(parts))
    least = min(map(fullest, cuts))
    if least > 1:
        with pytest.raises(UnsupportedError, match="does not fit"):
            split_evenly(parts, rooms, reserve_bytes=0)
        return
    places = split_evenly(parts, rooms, reserve_bytes=0)
    assert places == sorted(places)
    assert fullest(places) == least
