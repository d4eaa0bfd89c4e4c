"""Do the stored tensors match the topology? Names, shapes and dtypes; no weight is read.

Producer and consumer use the same check: the one on what it has just written, before
config.json exists, the other before it reads the first weight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from exllamav3.errors import TopologyError
from exllamav3.topology.facts import AttentionFacts, ModelFacts, TensorMeta
from exllamav3.topology.json_node import show, show_list
from exllamav3.topology.resolved import Projection, ResolvedTopology, TopologyRow
from exllamav3.topology.schema import (
    CODEBOOKS,
    CONFIG_PATH,
    FUSED_NAME,
    PAYLOAD,
    TILE,
    pad_to_block,
)

_ADVICE = (
    "The tensors and the declaration do not belong together; take both from one finished "
    "conversion."
)


def check_payload(
    topology: ResolvedTopology, facts: ModelFacts, inventory: Mapping[str, TensorMeta], where: str
) -> None:
    """Check the tensors of every declared block, and that nothing else is stored for it.

    Args:
        topology: the declared storage.
        facts: the model's attention blocks, for the input widths.
        inventory: every tensor of the checkpoint, by name.
        where: name of the checkpoint, for errors.

    Raises:
        TopologyError: a tensor is missing, superfluous, of wrong dtype or shape, of another
            K or codebook, or belongs to the other topology; or a row names no block of `facts`.
    """
    names = sorted(inventory)
    for row in topology.rows:
        block = facts.find(row.layer)
        if block is None:
            raise TopologyError(
                f"{where}: layer {show(row.layer)} is declared, but is no full-attention block "
                f"of this model. {_ADVICE}"
            )
        _Block(block, row, inventory, names, where).check()


def check_undeclared(
    facts: ModelFacts, inventory: Mapping[str, TensorMeta], where: str = "checkpoint"
) -> None:
    """Refuse a fused payload in a checkpoint without a declaration.

    Fusion is read from the declaration and never inferred from tensor names, so these
    tensors have no meaning that could be relied on. Only quantized checkpoints need this
    check: a source may well have a weight called `qkv_proj`.

    Raises:
        TopologyError: a full-attention block stores `<layer>.qkv_proj.{trellis,suh,svh}`.
    """
    for block in facts.attention:
        for suffix in PAYLOAD:
            name = f"{block.layer}.{FUSED_NAME}.{suffix}"
            if name in inventory:
                raise TopologyError(
                    f"{where}: tensor {show(name)} is the payload of a fused block, but "
                    f"config.json has no {CONFIG_PATH}, and fusion is never inferred "
                    f"from tensor names. Restore the declaration in config.json; "
                    f"quantization_config.json and the shard headers carry copies of it."
                )


class _Block:
    """The check of one block; holds what its error messages need."""

    __slots__ = ("block", "inventory", "names", "row", "where")

    def __init__(
        self,
        block: AttentionFacts,
        row: TopologyRow,
        inventory: Mapping[str, TensorMeta],
        names: list[str],
        where: str,
    ) -> None:
        self.block = block
        self.row = row
        self.inventory = inventory
        self.names = names
        self.where = where

    def check(self) -> None:
        for key in self.row.absent_keys():
            found = self._below(key)
            if found:
                raise self._error(
                    f"tensor {show(found[0])} is stored, but a {self.row.variant} block stores "
                    f"nothing under {show(key)}"
                )
        for projection, width in zip(self.row.projections, self.row.stored_widths, strict=True):
            self._check_linear(projection, width)

    def _error(self, problem: str) -> TopologyError:
        return TopologyError(
            f"{self.where}: layer {show(self.row.layer)}, declared {self.row.variant}: {problem}. "
            f"{_ADVICE}"
        )

    def _below(self, key: str) -> list[str]:
        """Names of the tensors stored under a module key."""
        prefix = f"{key}."
        start = bisect_left(self.names, prefix)
        stop = start
        while stop < len(self.names) and self.names[stop].startswith(prefix):
            stop += 1
        return self.names[start:stop]

    def _check_linear(self, projection: Projection, width: int) -> None:
        key = self.row.key(projection)
        suffixes = [name[len(key) + 1 :] for name in self._below(key)]
        for suffix in PAYLOAD:
            if suffix not in suffixes:
                stored = f"stored are {show_list(suffixes, 9)}" if suffixes else "nothing is stored"
                raise self._error(f"tensor {show(f'{key}.{suffix}')} is missing; {stored}")
        self._check_marker(key, projection, suffixes)
        for suffix in suffixes:
            if suffix not in (*PAYLOAD, projection.codebook, "bias"):
                raise self._error(
                    f"tensor {show(f'{key}.{suffix}')} is stored, but an EXL3 linear has only "
                    f"trellis, suh, svh, its marker and a bias"
                )
        in_width = pad_to_block(self.block.in_features)
        self._check_trellis(key, projection, in_width, width)
        self._check_tensor(f"{key}.suh", ("F16",), (in_width,))
        self._check_tensor(f"{key}.svh", ("F16",), (width,))
        if "bias" in suffixes:
            # Split payloads of other producers may hold float32 biases; ours never do.
            dtypes = ("F16",) if self.row.is_fused else ("F16", "F32")
            self._check_tensor(f"{key}.bias", dtypes, (width,))

    def _check_marker(self, key: str, projection: Projection, suffixes: list[str]) -> None:
        markers = [name for name in CODEBOOKS if name in suffixes]
        if markers != [projection.codebook]:
            found = show_list(markers) if markers else "no marker (which means 3inst)"
            raise self._error(
                f"{show(key)} has codebook marker {found}, expected exactly "
                f"{show(projection.codebook)}"
            )
        name = f"{key}.{projection.codebook}"
        meta = self.inventory[name]
        if meta.dtype != "I32" or any(size != 1 for size in meta.shape):
            raise self._error(f"tensor {show(name)} is {meta}, expected one I32 value")

    def _check_trellis(self, key: str, projection: Projection, in_width: int, width: int) -> None:
        name = f"{key}.trellis"
        meta = self.inventory[name]
        expected = (in_width // TILE, width // TILE, TILE * projection.bits)
        if meta.dtype == "I16" and meta.shape[:-1] == expected[:-1] and meta.shape != expected:
            raise self._error(
                f"tensor {show(name)} is {meta}, which is K={meta.shape[-1] / TILE:g}, expected "
                f"the declared K={projection.bits} and {list(expected)}"
            )
        self._check_tensor(name, ("I16",), expected)

    def _check_tensor(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        meta = self.inventory[name]
        if meta.dtype not in dtypes or meta.shape != shape:
            raise self._error(
                f"tensor {show(name)} is {meta}, expected {' or '.join(dtypes)} {list(shape)}"
            )
