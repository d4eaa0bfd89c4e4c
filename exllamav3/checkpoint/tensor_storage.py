"""The `tensor_storage` inventory of quantization_config.json: what is stored for each module.

One entry for each leaf module of the text model. It repeats what the headers say, so it is
checked against them and never trusted in their place. Source: docs/format.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from exllamav3.checkpoint.header import DTYPE_BITS
from exllamav3.codec.params import Codebook, bits_of_trellis
from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta

TORCH_NAMES = {
    "BF16": "torch.bfloat16",
    "F16": "torch.float16",
    "F32": "torch.float32",
    "F64": "torch.float64",
    "I64": "torch.int64",
    "I32": "torch.int32",
    "I16": "torch.int16",
    "I8": "torch.int8",
    "U8": "torch.uint8",
    "BOOL": "torch.bool",
}
"""How the inventory spells the dtypes of safetensors."""


@dataclass(frozen=True, slots=True)
class ModuleStorage:
    """The entry of one leaf module.

    tensors: shape and dtype by full tensor name, in stored order.
    bits, codebook: of an EXL3 linear, derived from its tensors; None for anything else.
    """

    key: str
    tensors: Mapping[str, TensorMeta]
    bits: float | None = None
    codebook: Codebook | None = None

    @classmethod
    def from_tensors(cls, key: str, tensors: Mapping[str, TensorMeta]) -> ModuleStorage:
        """Derive an entry from the tensors of one module (names begin with `<key>.`)."""
        trellis = tensors.get(f"{key}.trellis")
        if trellis is None:
            return cls(key, tensors)
        codebook = Codebook.INST3
        for candidate in Codebook:
            if candidate.marker and f"{key}.{candidate.marker}" in tensors:
                codebook = candidate
        bits = bits_of_trellis(trellis.shape[-1], f"{key}.trellis")
        return cls(key, tensors, bits, codebook)

    def to_obj(self) -> dict[str, Any]:
        """The JSON object of this entry; a declared payload's gets more keys from
        `topology.storage_annotation`."""
        obj: dict[str, Any] = {
            "stored_tensors": {
                name: {
                    "shape": list(meta.shape),
                    "n_bytes": prod(meta.shape) * DTYPE_BITS[meta.dtype] // 8,
                    "dtype": TORCH_NAMES[meta.dtype],
                }
                for name, meta in self.tensors.items()
            }
        }
        if self.bits is not None and self.codebook is not None:
            obj["quant_format"] = "exl3"
            obj["bits_per_weight"] = self.bits
            if self.codebook.marker:
                obj[f"{self.codebook.marker}_multiplier"] = self.codebook.multiplier
        return obj


def check_storage(obj: Any, inventory: Mapping[str, TensorMeta], where: str) -> None:
    """Compare a stored inventory with the tensors there are.

    Args:
        obj: the JSON value of `tensor_storage`.
        inventory: shape and dtype of every tensor of the checkpoint.
        where: file and JSON path, for messages.

    Raises:
        FormatError: an entry is malformed, names a tensor that is not stored, or gives it another
            shape, dtype, size, rate or codebook than it has.
    """
    if not isinstance(obj, dict):
        raise FormatError(f"{where}: is a {type(obj).__name__}, expected an object")
    for key, entry in obj.items():
        here = f"{where}[{key!r}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("stored_tensors"), dict):
            raise FormatError(f"{here}: expected an object with a stored_tensors object")
        for name in entry["stored_tensors"]:
            if name not in inventory:
                raise FormatError(
                    f"{here}: lists tensor {name}, which no shard holds; the inventory is stale"
                )
        held = {name: inventory[name] for name in entry["stored_tensors"]}
        expected = ModuleStorage.from_tensors(key, held).to_obj()
        for field_name, value in expected.items():
            if entry.get(field_name) != value:
                raise FormatError(
                    f"{here}.{field_name}: says {entry.get(field_name)!r}, the stored tensors say "
                    f"{value!r}; the inventory is stale, the tensors count"
                )
