"""What a model says about its attention, and what a file says about its tensors.

The topology package never sees a model or a file: callers hand it these records.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from exllamav3.topology.json_node import MAX_SHOWN_CHARACTERS, Node, show, show_list


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One full-attention block of the primary text decoder, as the architecture defines it.

    layer: full dotted path of the attention module.
    in_features: unpadded input width, common to q, k and v.
    output_splits: unpadded output widths of q, k and v; an interleaved query/gate
        projection counts with its whole width, 2 * heads * head_dim.
    qmaps: labels of the calibration inputs of q, k and v, None for a projection that
        is not quantized.
    """

    layer: str
    in_features: int
    output_splits: tuple[int, int, int]
    qmaps: tuple[str | None, str | None, str | None]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The attention-like blocks of a model.

    attention: full-attention blocks of the primary text decoder, each path once.
    other: paths that a plan might name by mistake, with what they are, for example
        ``{"model.layers.0.linear_attn": "gated delta net"}``.
    """

    attention: tuple[AttentionFacts, ...]
    other: Mapping[str, str] = field(default_factory=dict)

    def find(self, layer: str) -> AttentionFacts | None:
        """The full-attention block of that path, or None."""
        return next((facts for facts in self.attention if facts.layer == layer), None)

    def require(self, layer: str, node: Node) -> AttentionFacts:
        """The full-attention block that a document names.

        Raises:
            TopologyError: it is none; the message lists the blocks there are, the
                most similar names first.
        """
        facts = self.find(layer)
        if facts is not None:
            return facts
        advice = f"Full-attention blocks of this model: {show_list(self._alike_first(layer))}."
        if layer in self.other:
            raise node.error(
                f"layer {show(layer)} ({self.other[layer]}) is not a full-attention block of the "
                f"text decoder",
                advice,
            )
        raise node.error(f"layer {show(layer)} is not in this model", advice)

    def _alike_first(self, layer: str) -> list[str]:
        layers = [facts.layer for facts in self.attention]
        close = difflib.get_close_matches(layer[:MAX_SHOWN_CHARACTERS], layers, n=3)
        return close + [name for name in layers if name not in close]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and safetensors dtype name ("BF16", "F16", "I16", "I32", "F32") of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"
