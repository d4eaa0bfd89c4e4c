"""Layer split: which device gets which top-level module of a model.

Modules stay in order and every device gets consecutive ones, so activations cross from one
device to the next once a pass. Numbers in, numbers out: nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from exllamav3.errors import UnsupportedError

GIB = 2**30
RESERVE_BYTES = GIB
"""Left free on each device by `split_evenly`, for activations and reconstructed matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """A top-level module: its key, and what its weights and the caches of its layers take."""

    key: str
    weight_bytes: int
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Weights and caches."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """A device: its name, and the memory that is free on it."""

    device: str
    free_bytes: int


def split_evenly(
    parts: Sequence[Part], rooms: Sequence[Room], reserve_bytes: int = RESERVE_BYTES
) -> list[int]:
    """Fill all devices to about the same share of their free memory less the reserve.

    The fullest device is as empty as whole modules in order allow.

    Returns:
        Index of the device of each part, ascending.

    Raises:
        UnsupportedError: it does not fit; the message says what each device needs and has.
    """
    capacities = [max(0, room.free_bytes - reserve_bytes) for room in rooms]
    places, fullest = _least_full([part.total_bytes for part in parts], capacities)
    if fullest > 1:
        raise _misfit(
            parts,
            places,
            [(room.device, capacity) for room, capacity in zip(rooms, capacities, strict=True)],
            f"{_gib(reserve_bytes)} of each are kept for activations",
        )
    return places


def split_by_limits(
    parts: Sequence[Part], rooms: Sequence[Room], limits_bytes: Sequence[int]
) -> list[int]:
    """Fill the devices one after the other, each up to its limit of weights.

    Args:
        limits_bytes: one a device; caches do not count towards it.

    Returns:
        Index of the device of each part, ascending.

    Raises:
        UnsupportedError: the limits are too small for the weights, or a device has less memory
            free than its weights and caches take.
    """
    places: list[int] = []
    device, used = 0, 0
    for part in parts:
        while used + part.weight_bytes > limits_bytes[device]:
            device, used = device + 1, 0
            if device == len(rooms):
                raise _limits_misfit(parts, places, rooms, limits_bytes)
        used += part.weight_bytes
        places.append(device)
    need = _sums([part.total_bytes for part in parts], places, len(rooms))
    if any(n > room.free_bytes for n, room in zip(need, rooms, strict=True)):
        free = [(room.device, room.free_bytes) for room in rooms]
        raise _misfit(parts, places, free, "caches do not count in use_per_device")
    return places


def _least_full(costs: Sequence[int], capacities: Sequence[int]) -> tuple[list[int], float]:
    """Cut a list into consecutive runs, one a capacity, so that the largest share is least.

    Of equally good cuts the one with the least sum of squared shares is taken.

    Returns:
        Index of the run of each cost, and the largest share, infinite where nothing fits.
    """
    sums = list(accumulate(costs, initial=0))
    # best[end]: the largest share and the sum of squares with `end` costs in the runs so far.
    best = [(0.0, 0.0)] + [(inf, inf)] * len(costs)
    begins: list[list[int]] = []
    for capacity in capacities:
        step = []
        for end in range(len(sums)):
            choices = []
            for begin in range(end + 1):
                share = _share(sums[end] - sums[begin], capacity)
                largest, squares = best[begin]
                choices.append((max(largest, share), squares + share * share, begin))
            step.append(min(choices))
        best = [(largest, squares) for largest, squares, _ in step]
        begins.append([begin for _, _, begin in step])
    places = [0] * len(costs)
    end = len(costs)
    for run in range(len(capacities) - 1, -1, -1):
        begin = begins[run][end]
        places[begin:end] = [run] * (end - begin)
        end = begin
    return places, best[-1][0]


def _share(cost: int, capacity: int) -> float:
    if not cost:
        return 0.0
    return cost / capacity if capacity else inf


def _sums(numbers: Sequence[int], places: Sequence[int], count: int) -> list[int]:
    sums = [0] * count
    for number, place in zip(numbers, places, strict=True):
        sums[place] += number
    return sums


def _misfit(
    parts: Sequence[Part], places: Sequence[int], found: Sequence[tuple[str, int]], note: str
) -> UnsupportedError:
    needs = _sums([part.total_bytes for part in parts], places, len(found))
    table = "; ".join(
        f"{device} needs {_gib(need)}, has {_gib(has)}"
        for need, (device, has) in zip(needs, found, strict=True)
    )
    weights = sum(part.weight_bytes for part in parts)
    caches = sum(part.cache_bytes for part in parts)
    return UnsupportedError(
        f"devices: the model does not fit, weights of {_gib(weights)} and caches of "
        f"{_gib(caches)}: {table} ({note}); name more devices, make the cache smaller, or take a "
        f"conversion of fewer bits"
    )


def _limits_misfit(
    parts: Sequence[Part],
    places: Sequence[int],
    rooms: Sequence[Room],
    limits_bytes: Sequence[int],
) -> UnsupportedError:
    weights = [part.weight_bytes for part in parts]
    filled = _sums(weights[: len(places)], places, len(rooms))
    table = "; ".join(
        f"{room.device} takes {_gib(used)} of {_gib(limit)}"
        for room, used, limit in zip(rooms, filled, limits_bytes, strict=True)
    )
    return UnsupportedError(
        f"use_per_device: too little for weights of {_gib(sum(weights))}: {table}; no place for "
        f"{parts[len(places)].key} and what follows, {_gib(sum(weights[len(places) :]))}. Raise "
        f"the limits or name more devices"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
