"""What a model folder holds, from file headers alone: no weight is read.

An entry describes one weight: the tensors of an EXL3 linear together, any other tensor alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from exllamav3.checkpoint.header import DTYPE_BITS
from exllamav3.codec.bit_rate import HEAD, bit_rate
from exllamav3.codec.params import Codebook, bits_of_trellis
from exllamav3.codec.tensor import EXL3_SUFFIXES, is_exl3
from exllamav3.errors import FormatError
from exllamav3.topology import Declaration, TensorMeta

SUFFIXES = (*EXL3_SUFFIXES, "bias")


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight.

    key: key of an EXL3 linear, or the name of a plain tensor. kind: "exl3" or "dense".
    shape: `[in, out]` of an EXL3 linear, padding included; as stored for a plain tensor.
    dtype: safetensors name of what is stored. K: bits per weight, None unless EXL3.
    codebook: None unless EXL3. topology: "split" or "fused_uniform" where the checkpoint declares
    it for this weight, else None. numel: weights. size_bytes: of all its tensors.
    """

    key: str
    kind: str
    shape: list[int]
    dtype: str
    K: int | float | None
    codebook: str | None
    topology: str | None
    numel: int
    size_bytes: int
    tensors: list[str]


def take_inventory(
    tensors: Mapping[str, TensorMeta], declaration: Declaration | None
) -> list[Entry]:
    """Describe every weight, in the order of the files.

    Raises:
        FormatError: a trellis has a shape that belongs to no rate of the format.
    """
    declared = {
        row.key(projection): row.variant
        for row in (declaration.rows if declaration else ())
        for projection in row.projections
    }
    entries, done = [], set()
    for name in tensors:
        if name in done:
            continue
        key, _, suffix = name.rpartition(".")
        if suffix in SUFFIXES and is_exl3(key, tensors):
            entry = _exl3_entry(key, tensors, declared.get(key))
        else:
            entry = _dense_entry(name, tensors[name])
        done.update(entry.tensors)
        entries.append(entry)
    return entries


def totals(entries: list[Entry]) -> dict[str, Any]:
    """Sums over entries; `bits_per_weight` as `codec.bit_rate`, None without EXL3 linears."""
    quantized = [entry for entry in entries if entry.kind == "exl3"]
    rated = [(entry.key, entry.numel, float(entry.K or 0)) for entry in quantized]
    rated += [(HEAD, e.numel, DTYPE_BITS[e.dtype]) for e in entries if e.key == f"{HEAD}.weight"]
    return {
        "entries": len(entries),
        "exl3_linears": len(quantized),
        "exl3_weights": sum(entry.numel for entry in quantized),
        "exl3_bytes": sum(entry.size_bytes for entry in quantized),
        "bits_per_weight": asdict(bit_rate(rated)) if quantized else None,
        "size_bytes": sum(entry.size_bytes for entry in entries),
    }


def to_obj(entry: Entry) -> dict[str, Any]:
    """The JSON form of an entry."""
    return asdict(entry)


def _exl3_entry(key: str, tensors: Mapping[str, TensorMeta], topology: str | None) -> Entry:
    names = [f"{key}.{suffix}" for suffix in SUFFIXES if f"{key}.{suffix}" in tensors]
    trellis = tensors[f"{key}.trellis"]
    if len(trellis.shape) != 3:
        raise FormatError(
            f"{key}.trellis: has shape {list(trellis.shape)}, expected 3 dimensions (in / 16, "
            f"out / 16, 16 * K); the file is damaged or not EXL3"
        )
    rows, columns, words = trellis.shape
    codebooks = [c.value for c in Codebook if c.marker and f"{key}.{c.marker}" in tensors]
    shape = [rows * 16, columns * 16]
    return Entry(
        key=key,
        kind="exl3",
        shape=shape,
        dtype=trellis.dtype,
        K=bits_of_trellis(words, f"{key}.trellis"),
        codebook="+".join(codebooks) or Codebook.INST3.value,
        topology=topology,
        numel=shape[0] * shape[1],
        size_bytes=sum(_size_bytes(tensors[name]) for name in names),
        tensors=names,
    )


def _dense_entry(name: str, meta: TensorMeta) -> Entry:
    return Entry(
        key=name,
        kind="dense",
        shape=list(meta.shape),
        dtype=meta.dtype,
        K=None,
        codebook=None,
        topology=None,
        numel=prod(meta.shape),
        size_bytes=_size_bytes(meta),
        tensors=[name],
    )


def _size_bytes(meta: TensorMeta) -> int:
    return -(-prod(meta.shape) * DTYPE_BITS[meta.dtype] // 8)
