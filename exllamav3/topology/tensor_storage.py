"""What quantization_config.json says per linear about declared blocks."""

from __future__ import annotations

from exllamav3.topology.copies import first_difference
from exllamav3.topology.json_node import Node, show, show_list
from exllamav3.topology.resolved import ResolvedTopology
from exllamav3.topology.schema import COMPONENTS, MULTIPLIERS, TILE

_ADVICE = "Regenerate quantization_config.json from the tensors."


def storage_annotation(topology: ResolvedTopology, key: str) -> dict[str, object]:
    """The keys that a `tensor_storage` entry of a declared linear has beyond the usual ones.

    `codebook` and `scale`; for a fused linear also `components` and `output_splits`, so that
    q, k and v can be recovered without this library. Empty for an undeclared linear.
    """
    for row in topology.rows:
        for projection in row.projections:
            if row.key(projection) == key:
                fields: dict[str, object] = {
                    "codebook": projection.codebook,
                    "scale": projection.scale,
                }
                if row.is_fused:
                    fields["components"] = list(COMPONENTS)
                    fields["output_splits"] = list(row.output_splits)
                return fields
    return {}


def check_tensor_storage(
    topology: ResolvedTopology, storage: object, where: str = "quantization_config.json"
) -> None:
    """Compare the `tensor_storage` object with the declaration.

    Args:
        topology: the declared storage.
        storage: the object under `tensor_storage`, decoded.
        where: name of the file, for errors.

    Raises:
        TopologyError: an entry is missing, belongs to the other topology, or states another
            K, codebook, scale, component order or width.
    """
    root = Node(storage, where, "tensor_storage")
    entries = root.mapping(_ADVICE)
    for row in topology.rows:
        for key in row.absent_keys():
            found = next((e for e in entries if e == key or e.startswith(f"{key}.")), None)
            if found is not None:
                raise root.error(
                    f"entry {show(found)} is superfluous: layer {show(row.layer)} is {row.variant}",
                    _ADVICE,
                )
        for projection in row.projections:
            key = row.key(projection)
            if key not in entries:
                raise root.error(f"entry {show(key)} is missing", _ADVICE)
            node = Node(entries[key], where, f"tensor_storage[{show(key)}]")
            expected: dict[str, object] = {
                "quant_format": "exl3",
                "bits_per_weight": projection.bits,
                f"{projection.codebook}_multiplier": MULTIPLIERS[projection.codebook],
                **storage_annotation(topology, key),
            }
            _check_entry(node, expected)
            _check_stored_tensors(node, key, projection.bits, projection.codebook)


def _check_entry(node: Node, expected: dict[str, object]) -> None:
    entry = node.mapping(_ADVICE)
    relevant = {*expected, "components", "output_splits"}
    relevant.update(f"{codebook}_multiplier" for codebook in MULTIPLIERS)
    difference = first_difference(
        {key: value for key, value in entry.items() if key in relevant}, expected
    )
    if difference is not None:
        raise node.error(f"{difference} (compared with the declaration)", _ADVICE)


def _check_stored_tensors(node: Node, key: str, bits: int, codebook: str) -> None:
    tensors = node.member("stored_tensors")
    shape = tensors.member(f"{key}.trellis").member("shape")
    sizes = [item.value for item in shape.array(_ADVICE)]
    if len(sizes) != 3 or type(sizes[2]) is not int or sizes[2] != TILE * bits:
        raise shape.error(
            f"the trellis has shape {show_list(sizes, 4)}, expected three sizes, the last "
            f"{TILE * bits} (K={bits})",
            _ADVICE,
        )
    tensors.member(f"{key}.{codebook}")
