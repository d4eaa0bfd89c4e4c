"""The steps a job takes only when it has a QKV topology plan.

Without a plan nothing here is called and nothing of `exllamav3.topology` runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError
from exllamav3.topology import (
    METADATA_KEY,
    Plan,
    ResolvedTopology,
    check_copies,
    check_payload,
    check_plan,
    check_resumed_plan,
    check_source,
    check_tensor_storage,
    load_plan,
    parse_plan,
    resolve_plan,
)

from .options import ConversionOptions
from .source import Source


def new_plan(path: str, source: Source, options: ConversionOptions) -> Plan:
    """Read a plan and check all of it that needs no bit allocation.

    Raises:
        TopologyError: the plan is malformed, or does not fit the model or the job's options.
    """
    plan = load_plan(path)
    check_plan(plan, source.facts(), options.codebook, options.out_scales)
    return plan


def resumed_plan(stored: str | None, given_path: str | None, where: str) -> Plan | None:
    """The plan of a resumed job, which is the stored one.

    Raises:
        TopologyError: a plan is given and its content is another.
    """
    plan = parse_plan(stored, f"{where}, qkv_topology") if stored is not None else None
    if given_path is not None:
        check_resumed_plan(plan, load_plan(given_path))
    return plan


def refuse_new_defaults(changed: tuple[str, ...], where: str) -> None:
    """A plan was resolved with the job's codebook and scale policy: they cannot change later.

    Raises:
        ConversionError: one of them would.
    """
    fixed = [name for name in ("codebook", "out_scales") if name in changed]
    if fixed:
        raise ConversionError(
            f"{where}: {' and '.join(fixed)} cannot change on resume, because the job's QKV "
            f"topology was resolved with the stored value; leave the option out, or start a new "
            f"job in an empty folder"
        )


def resolve(
    plan: Plan, source: Source, options: ConversionOptions, allocated: Mapping[str, int]
) -> ResolvedTopology:
    """Decide every block's storage, and check that the source can be stored that way.

    Raises:
        TopologyError: a block cannot be stored as planned; no weight has been read.
    """
    facts = source.facts()
    topology = resolve_plan(plan, facts, options.codebook, options.out_scales, allocated)
    check_source(topology, facts, source.tensors.inventory(), str(source.directory))
    return topology


def shard_header(topology: ResolvedTopology) -> dict[str, str]:
    """`__metadata__` of every shard."""
    return {METADATA_KEY: topology.to_compact_json()}


def index_metadata(topology: ResolvedTopology) -> dict[str, Any]:
    """What the index says beside the total size."""
    return {METADATA_KEY: topology.to_obj()}


def verify(
    topology: ResolvedTopology,
    source: Source,
    written: TensorFiles,
    section: Mapping[str, Any],
    storage: Mapping[str, Any],
) -> None:
    """Check what was written against the declaration, before config.json makes it a model.

    Args:
        written: the output folder, opened again.
        section: the object for `quantization_config`, which carries the declaration.
        storage: the object for `tensor_storage`.

    Raises:
        TopologyError: a payload or a copy of the declaration is not what it should be.
    """
    where = str(written.directory)
    check_payload(topology, source.facts(), written.inventory(), where)
    copies: dict[str, object] = {"quantization_config.json": section.get(METADATA_KEY)}
    for name, header in written.headers.items():
        copies[f"{name}, __metadata__.{METADATA_KEY}"] = header.metadata.get(METADATA_KEY)
    if written.index is not None:
        copies[f"{written.index.path.name}, metadata"] = written.index.metadata.get(METADATA_KEY)
    check_copies(topology, copies, required=True)
    check_tensor_storage(topology, storage, f"{where}/quantization_config.json")
