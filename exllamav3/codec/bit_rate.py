"""Mean bits per weight of a model, counted the same way wherever they are told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEAD = "lm_head"
MTP = "mtp."


@dataclass(frozen=True, slots=True)
class BitRate:
    """Mean K over stored weights, both sides padded to 128; scales and biases are not counted.

    decoder: over the quantized linears of the decoder's blocks, which share the budget of a
        conversion; None where there are none.
    with_head: with lm_head, at 16 bits where it is stored as float16.
    with_mtp: with the quantized linears of the multi-token-prediction head too; None without.
    """

    decoder: float | None
    with_head: float | None
    with_mtp: float | None = None

    def __str__(self) -> str:
        """`decoder 4.03, with head 4.21`."""
        parts = {"decoder": self.decoder, "with head": self.with_head, "with MTP": self.with_mtp}
        return ", ".join(f"{name} {bits:.2f}" for name, bits in parts.items() if bits is not None)


def bit_rate(linears: Iterable[tuple[str, int, float]]) -> BitRate:
    """The mean rates of a model.

    Args:
        linears: key, number of stored weights and bits per weight of each.
    """
    sums = {"decoder": [0, 0.0], "head": [0, 0.0], "mtp": [0, 0.0]}
    for key, weights, bits in linears:
        part = "head" if key == HEAD else "mtp" if key.startswith(MTP) else "decoder"
        sums[part][0] += weights
        sums[part][1] += weights * bits

    def mean(*parts: str) -> float | None:
        weights = sum(sums[part][0] for part in parts)
        return sum(sums[part][1] for part in parts) / weights if weights else None

    with_mtp = mean("decoder", "head", "mtp") if sums["mtp"][0] else None
    return BitRate(mean("decoder"), mean("decoder", "head"), with_mtp)
