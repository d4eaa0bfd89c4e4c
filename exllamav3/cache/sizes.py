"""How much memory a layer of a cache takes, known before it takes it."""

from __future__ import annotations

import torch

from exllamav3.cache.pages import PAGE_SIZE
from exllamav3.cache.quantized import GROUP
from exllamav3.modules.context import KvSpec, RecurrentSpec


def spec_bytes(
    spec: KvSpec | RecurrentSpec,
    pages: int,
    slots: int,
    bits: tuple[int, int] | None,
    dtype: torch.dtype,
) -> int:
    """Bytes of one layer's storage; equals its `size_bytes` once it is there.

    Args:
        spec: what the layer stores.
        pages: of keys and values.
        slots: of recurrent states.
        bits: rates of k and v, None where they are not rounded.
        dtype: of the activations.
    """
    if isinstance(spec, RecurrentSpec):
        conv = spec.conv_channels * (spec.conv_kernel - 1)
        delta = spec.value_heads * spec.key_dim * spec.value_dim
        return slots * (conv + delta) * torch.float32.itemsize
    places, lanes = pages * PAGE_SIZE, spec.kv_heads * spec.head_dim
    if bits is None:
        return 2 * places * lanes * dtype.itemsize
    # A word of 32 lanes for each bit, and a float16 scale for each group of 32.
    return sum(places * (lanes // GROUP) * (4 * rate + 2) for rate in bits)
