"""Packing output tensors into shards, and the index over them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exllamav3.checkpoint.index import INDEX_NAME

from .durable import Step, write_json
from .tensor_file import PendingTensor, write_tensor_file

MEBIBYTE = 1 << 20
SHARD_NAME = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
"""Names that `shard_names` makes."""


@dataclass(frozen=True, slots=True)
class OutputGroup:
    """Tensors that stay in one file: those of one module."""

    key: str
    tensors: tuple[PendingTensor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def plan_shards(groups: Sequence[OutputGroup], limit_bytes: int) -> list[list[OutputGroup]]:
    """Consecutive groups per file; a file exceeds the limit only if one group alone does."""
    shards: list[list[OutputGroup]] = []
    filled_bytes = 0
    for group in groups:
        if not shards or filled_bytes + group.size_bytes > limit_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(group)
        filled_bytes += group.size_bytes
    return shards


def shard_names(count: int) -> list[str]:
    """`model.safetensors` for one shard, numbered names for several."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_shards(
    folder: Path,
    groups: Sequence[OutputGroup],
    limit_bytes: int,
    header: Mapping[str, str] | None,
    index_metadata: Mapping[str, Any],
    step: Step,
) -> list[str]:
    """Write all shards, and the index when there are several.

    Args:
        header: `__metadata__` of every shard, None for none.
        index_metadata: what the index says beside the total size.

    Returns:
        Names of the shards.
    """
    shards = plan_shards(groups, limit_bytes)
    names = shard_names(len(shards))
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        tensors = [tensor for group in shard for tensor in group.tensors]
        write_tensor_file(folder / name, tensors, header, step, "shard tensor")
        weight_map.update({tensor.name: name for tensor in tensors})
    if len(shards) > 1:
        total_bytes = sum(group.size_bytes for group in groups)
        metadata = {"total_size": total_bytes, **index_metadata}
        write_json(folder / INDEX_NAME, {"metadata": metadata, "weight_map": weight_map})
    return names
