"""The devices a model may be loaded on: names checked, memory asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.split import GIB, Part, Room, split_by_limits, split_evenly
from exllamav3.modules.attention import Attention
from exllamav3.modules.gated_delta_net import GatedDeltaNet
from exllamav3.modules.module import Module, TensorSource
from exllamav3.ops.status import require_device, require_present


class HasPendingBytes(Protocol):
    """What is needed of a cache: memory that each decoder layer of it will still take."""

    def pending_bytes(self, dtype: torch.dtype) -> dict[int, int]: ...


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The one device of a model; None means the GPU if there is one, else the CPU.

    Raises:
        UnsupportedError: torch does not know it, it is not there, or this build cannot serve it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = _parse(device, "device")
    require_device(target)
    require_present(target)
    return target


def resolve_devices(devices: Sequence[str | torch.device]) -> list[torch.device]:
    """The GPUs of a layer split, each with its number.

    Raises:
        FormatError: none is named, or one twice.
        UnsupportedError: one is no GPU of this machine, or this build cannot serve it.
    """
    if isinstance(devices, str | torch.device):
        raise FormatError(f"devices is {devices!r}, expected a list of devices; or use `device`")
    count = torch.cuda.device_count()
    there = ", ".join(f"cuda:{n}" for n in range(count)) or "none"
    found: list[torch.device] = []
    for name in devices:
        device = _parse(name, "devices")
        if device.type != "cuda":
            raise UnsupportedError(
                f"devices: {str(name)!r} is no GPU, and layers are split over GPUs only (GPUs "
                f"here: {there}); leave it out. A model on the CPU takes device='cpu'"
            )
        if device.index is None and count:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index is None or device.index >= count:
            raise UnsupportedError(
                f"devices: {str(name)!r} does not exist here; GPUs here: {there}"
            )
        if device in found:
            raise FormatError(f"devices: {device} is named twice in {[*map(str, devices)]}")
        require_device(device)
        found.append(device)
    if not found:
        raise FormatError("devices is empty, expected at least one GPU")
    return found


def place_modules(
    modules: Sequence[Module],
    source: TensorSource,
    caches: Iterable[HasPendingBytes],
    devices: Sequence[torch.device],
    use_per_device: Sequence[float] | None,
    dtype: torch.dtype,
) -> list[torch.device]:
    """The device of each top-level module, from file headers and free memory.

    Args:
        modules: in the order of a pass.
        source: of the tensors; none is read.
        caches: that will take memory beside the layers.
        devices: from `resolve_devices`.
        use_per_device: GiB of weights for each, None for equal shares of the free memory.
        dtype: of the activations.

    Raises:
        FormatError: `use_per_device` is malformed.
        UnsupportedError: the modules do not fit.
    """
    limits = None if use_per_device is None else _limits_in_bytes(use_per_device, devices)
    pending = Counter[int]()
    for cache in caches:
        pending.update(cache.pending_bytes(dtype))
    parts = []
    for top in modules:
        specs = [m.cache_spec for m in top if isinstance(m, Attention | GatedDeltaNet)]
        cached = sum(pending[spec.layer] for spec in specs)
        parts.append(Part(top.key, top.total_bytes(source, dtype), cached))
    rooms = [Room(str(device), free_bytes(device)) for device in devices]
    places = split_by_limits(parts, rooms, limits) if limits else split_evenly(parts, rooms)
    return [devices[index] for index in places]


def _limits_in_bytes(use_per_device: Sequence[float], devices: Sequence[torch.device]) -> list[int]:
    if not isinstance(use_per_device, Sequence) or isinstance(use_per_device, str):
        raise FormatError(f"use_per_device is {use_per_device!r}, expected a list of sizes in GiB")
    if len(use_per_device) != len(devices):
        raise FormatError(
            f"use_per_device has {len(use_per_device)} sizes, expected one for each of the "
            f"{len(devices)} devices {', '.join(map(str, devices))}"
        )
    for size in use_per_device:
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < 1e9:
            raise FormatError(f"use_per_device: {size!r} is no size in GiB of 2^30 bytes")
    return [int(size * GIB) for size in use_per_device]


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody holds, counting what torch keeps for reuse."""
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


def _parse(device: str | torch.device, argument: str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(
            f"{argument}: {device!r} is not one that torch knows; use cpu, cuda or cuda:N"
        ) from error
