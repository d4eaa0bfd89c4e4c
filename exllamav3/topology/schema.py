"""The vocabulary of `exl3_qkv_topology/1`: names, domains and the metadata key.

Source: docs/qkv_topology.md.
"""

from __future__ import annotations

SCHEMA = "exl3_qkv_topology/1"
"""Value of `schema`, the only version that is read or written."""
METADATA_KEY = "exl3_qkv_topology"
"""Key of the declaration in `quantization_config`, shard headers and the index."""
CONFIG_PATH = f"quantization_config.{METADATA_KEY}"
"""JSON path of the authoritative declaration inside config.json."""

SPLIT = "split"
FUSED = "fused_uniform"
VARIANTS = (SPLIT, FUSED)

COMPONENTS = ("q_proj", "k_proj", "v_proj")
"""Frozen order of the components: in projections, in output_splits, in a fused weight."""
FUSED_NAME = "qkv_proj"
"""Name of the one linear of a fused block."""

MIN_BITS = 3
MAX_BITS = 8
MAX_WIDTH = 2**31 - 1
"""Bound of an output width: no tensor dimension is larger, and hostile integers end here."""
CODEBOOKS = ("mcg", "mul1")
SCALES = ("always", "never", "auto")
"""Policies for output channel scales, of a projection as of a whole job."""

# Repeated from `exllamav3.codec`, because this package imports only the standard library and
# `exllamav3.errors`; a test compares the two.
TILE = 16
HADAMARD_BLOCK = 128
PAYLOAD = ("trellis", "suh", "svh")
MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Values of the marker tensors, unsigned."""


def pad_to_block(width: int) -> int:
    """Round a width up to whole Hadamard blocks of 128, as stored weights are."""
    return -(-width // HADAMARD_BLOCK) * HADAMARD_BLOCK
