"""Can these source tensors be fused? Shapes and dtypes only; no weight is read."""

from __future__ import annotations

from collections.abc import Mapping

from exllamav3.errors import TopologyError
from exllamav3.topology.facts import AttentionFacts, ModelFacts, TensorMeta
from exllamav3.topology.json_node import show, show_list
from exllamav3.topology.resolved import ResolvedTopology
from exllamav3.topology.schema import COMPONENTS

_SPLIT_INSTEAD = "Make the block split in the plan"
_BIAS_DTYPES = ("BF16", "F16", "F32")


def check_source(
    topology: ResolvedTopology,
    facts: ModelFacts,
    inventory: Mapping[str, TensorMeta],
    where: str = "source checkpoint",
) -> None:
    """Check that q, k and v of every fused block can be concatenated.

    Split blocks take the ordinary way through the converter and are not looked at.

    Args:
        topology: the resolved plan.
        facts: the model's attention blocks.
        inventory: every tensor of the source checkpoint, by name.
        where: name of the source, for errors.

    Raises:
        TopologyError: of a fused block, the projections do not share one calibration input,
            a weight is missing, not BF16 or not `[out, in]` as the architecture defines it,
            only some have a bias, or a bias has a wrong shape or dtype.
    """
    for row in topology.rows:
        if row.is_fused:
            block = facts.find(row.layer)
            if block is None:
                raise TopologyError(f"{where}: layer {show(row.layer)} is not in this model")
            _check_qmaps(block, where)
            _check_weights(block, inventory, where)
            _check_biases(block, inventory, where)


def _error(block: AttentionFacts, where: str, problem: str, advice: str) -> TopologyError:
    return TopologyError(f"{where}: layer {show(block.layer)} cannot be fused: {problem}. {advice}")


def _check_qmaps(block: AttentionFacts, where: str) -> None:
    if len(set(block.qmaps)) != 1 or block.qmaps[0] is None:
        found = ", ".join(
            f"{name}: {show(qmap)}" for name, qmap in zip(COMPONENTS, block.qmaps, strict=True)
        )
        raise _error(
            block,
            where,
            f"its projections are calibrated with different inputs ({found}), expected one for "
            f"all three",
            f"{_SPLIT_INSTEAD}.",
        )


def _check_weights(block: AttentionFacts, inventory: Mapping[str, TensorMeta], where: str) -> None:
    for name, width in zip(COMPONENTS, block.output_splits, strict=True):
        tensor = f"{block.layer}.{name}.weight"
        meta = inventory.get(tensor)
        if meta is None:
            raise _error(
                block, where, f"tensor {show(tensor)} is missing", "Check that the source is whole."
            )
        if meta.dtype != "BF16":
            raise _error(
                block,
                where,
                f"tensor {show(tensor)} is {meta.dtype}, expected BF16",
                f"{_SPLIT_INSTEAD}, or convert from a BF16 source.",
            )
        expected = (width, block.in_features)
        if meta.shape != expected:
            raise _error(
                block,
                where,
                f"tensor {show(tensor)} has shape {list(meta.shape)}, expected {list(expected)} "
                f"by the model's configuration",
                "Check that config.json belongs to these weights.",
            )


def _check_biases(block: AttentionFacts, inventory: Mapping[str, TensorMeta], where: str) -> None:
    names = [f"{block.layer}.{name}.bias" for name in COMPONENTS]
    present = [name for name in names if name in inventory]
    if present and len(present) != len(names):
        absent = [name for name in names if name not in inventory]
        raise _error(
            block,
            where,
            f"{show_list(present)} exist without {show_list(absent)}, expected all three biases "
            f"or none",
            f"{_SPLIT_INSTEAD}.",
        )
    for name, width in zip(present, block.output_splits, strict=False):
        meta = inventory[name]
        if meta.dtype not in _BIAS_DTYPES or meta.shape != (width,):
            raise _error(
                block,
                where,
                f"tensor {show(name)} is {meta}, expected BF16, F16 or F32 [{width}]",
                "Check that config.json belongs to these weights.",
            )
