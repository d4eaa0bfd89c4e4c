"""From a declaration, a model and its tensors to the resolved topology."""

from __future__ import annotations

from collections.abc import Mapping

from exllamav3.topology.declaration import Declaration
from exllamav3.topology.facts import AttentionFacts, ModelFacts, TensorMeta
from exllamav3.topology.json_node import show, show_list
from exllamav3.topology.payload import check_payload
from exllamav3.topology.resolved import ResolvedTopology, TopologyRow
from exllamav3.topology.schema import COMPONENTS, FUSED_NAME

_ADVICE = "The declaration belongs to another model or was edited; restore the original."


def validate_declaration(
    declaration: Declaration,
    facts: ModelFacts,
    inventory: Mapping[str, TensorMeta],
    where: str,
) -> ResolvedTopology:
    """Prove that a declaration describes this model and these tensors.

    Every full-attention block of the text decoder needs a row, quantized or not; nothing
    else may have one. Attention outside of the text decoder (MTP, vision) is not looked at.

    Args:
        declaration: from config.json.
        facts: the model's attention blocks.
        inventory: every tensor of the checkpoint, by name.
        where: name of the checkpoint, for errors about its tensors.

    Raises:
        TopologyError: rows missing or superfluous, widths other than the architecture's, or
            `check_payload` refuses the tensors.
    """
    if not facts.attention:
        raise declaration.node().error(
            "this model has no full-attention block in its text decoder", _ADVICE
        )
    for index, row in enumerate(declaration.rows):
        block = facts.require(row.layer, declaration.node(index))
        _check_splits(declaration, index, row, block)
    declared = {row.layer for row in declaration.rows}
    for block in facts.attention:
        if block.layer not in declared:
            raise declaration.node().error(
                f"layer {show(block.layer)} has no row, but is a full-attention block of the text "
                f"decoder and stores {_stored(block, inventory)}",
                _ADVICE,
            )
    topology = ResolvedTopology(declaration.rows)
    check_payload(topology, facts, inventory, where)
    return topology


def _check_splits(
    declaration: Declaration, index: int, row: TopologyRow, block: AttentionFacts
) -> None:
    if row.output_splits == block.output_splits:
        return
    problem = (
        f"output_splits are {list(row.output_splits)}, expected {list(block.output_splits)}, the "
        f"unpadded output widths of {show_list(COMPONENTS)}"
    )
    if row.output_splits[0] * 2 == block.output_splits[0]:
        problem += " (a gate interleaved with the query doubles the first)"
    raise declaration.node(index).error(problem, _ADVICE)


def _stored(block: AttentionFacts, inventory: Mapping[str, TensorMeta]) -> str:
    names = [f"{block.layer}.{name}.trellis" for name in (*COMPONENTS, FUSED_NAME)]
    return show_list(name for name in names if name in inventory)
