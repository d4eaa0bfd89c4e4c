"""One quantized weight as a value: the tensors of a checkpoint, checked and named.

Suffixes: `trellis_IOW` is (input tiles, output tiles, 16-bit words of a tile), `K` counts
input channels, `N` output channels. Sizes are padded to whole Hadamard blocks of 128.
Source of every rule: docs/format.md.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from exllamav3.codec.params import HADAMARD_BLOCK, TILE, Codebook, bits_of_trellis
from exllamav3.errors import FormatError
from exllamav3.ops import reconstruct, require_device
from exllamav3.ops.linear import check_linear_input, run_linear

LEGACY_SIGNS = {"suh": "su", "svh": "sv"}
"""Scales, and the packed signs that older files have in their place."""
PAYLOAD = ("trellis", *LEGACY_SIGNS)
"""Suffixes of the tensors that every EXL3 weight is written with."""
EXL3_SUFFIXES = (
    *PAYLOAD,
    *LEGACY_SIGNS.values(),
    *(codebook.marker for codebook in Codebook if codebook.marker is not None),
)
"""Suffixes of the tensors that may make up one EXL3 weight, without its bias."""


@dataclass(frozen=True, slots=True)
class Exl3Tensor:
    """A quantized linear weight, exactly as stored.

    trellis_IOW: int16 ``(k/16, n/16, 16 K)``, packed trellis
    suh_K, svh_N: float16 ``(k,)`` and ``(n,)``, signed scales
    codebook: which of the three maps from state to value
    bias_N: float16 ``(n,)`` or None, not quantized
    """

    trellis_IOW: Tensor
    suh_K: Tensor
    svh_N: Tensor
    codebook: Codebook
    bias_N: Tensor | None = None

    def __post_init__(self) -> None:
        check_exl3_tensor("EXL3 tensor", self)

    @property
    def bits(self) -> int | float:
        """Rate K in bits per weight, without the scales."""
        return bits_of_trellis(self.trellis_IOW.shape[2])

    @property
    def in_features(self) -> int:
        """Padded number of input channels, k."""
        return TILE * self.trellis_IOW.shape[0]

    @property
    def out_features(self) -> int:
        """Padded number of output channels, n."""
        return TILE * self.trellis_IOW.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of all its tensors."""
        return self.trellis_IOW.device

    @classmethod
    def from_tensors(cls, key: str, tensors: Mapping[str, Tensor]) -> Exl3Tensor:
        """Build from the tensors ``<key>.trellis``, ``<key>.suh`` and so on of a checkpoint.

        Accepts the legacy packed signs ``su``/``sv``, markers of any shape, and a float32 bias.

        Raises:
            FormatError: a tensor is missing, contradicts another one, or has a wrong
                dtype, shape or marker value; the message names its key.
        """
        trellis = _required(key, "trellis", tensors)
        bias = tensors.get(f"{key}.bias")
        if bias is not None and bias.dtype == torch.float32:
            bias = bias.to(torch.float16)
        weight = cls.__new__(cls)  # fields first, so that errors name the key
        for name, value in (
            ("trellis_IOW", trellis),
            ("suh_K", _scales(key, "suh", tensors)),
            ("svh_N", _scales(key, "svh", tensors)),
            ("codebook", _codebook(key, tensors)),
            ("bias_N", bias),
        ):
            object.__setattr__(weight, name, value)
        check_exl3_tensor(key, weight)
        for name, scales in (("suh", weight.suh_K), ("svh", weight.svh_N), ("bias", bias)):
            if scales is not None and not bool(scales.isfinite().all()):
                raise FormatError(
                    f"{key}.{name}: holds values that are not finite, every product would be NaN; "
                    f"the file is damaged: convert the model again or fetch a good copy"
                )
        return weight

    def to_tensors(self, key: str) -> dict[str, Tensor]:
        """The tensors of a checkpoint, contiguous: trellis, suh, svh, marker, bias."""
        tensors = {
            f"{key}.trellis": self.trellis_IOW.contiguous(),
            f"{key}.suh": self.suh_K.contiguous(),
            f"{key}.svh": self.svh_N.contiguous(),
        }
        if self.codebook.marker is not None:
            tensors[f"{key}.{self.codebook.marker}"] = marker_tensor(self.codebook)
        if self.bias_N is not None:
            tensors[f"{key}.bias"] = self.bias_N.contiguous()
        return tensors

    def reconstruct(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weight ``(k, n)`` in the original basis, without the bias."""
        return reconstruct(self.trellis_IOW, self.suh_K, self.svh_N, self.codebook, dtype)

    def forward(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """``x W + bias``: ``(..., k)`` -> ``(..., n)``, padded widths.

        As `ops.exl3_linear`, without its checks of the weight, which was checked when it
        was made: they would take longer than a small product.
        """
        require_device(self.device)
        check_linear_input("Exl3Tensor.forward", x, self.in_features, self.device)
        return run_linear(
            x,
            self.trellis_IOW,
            self.suh_K,
            self.svh_N,
            self.bias_N,
            self.codebook.id,
            x.dtype if out_dtype is None else out_dtype,
        )

    def to(self, device: torch.device | str) -> Exl3Tensor:
        """The same weight on a device."""
        return Exl3Tensor(
            self.trellis_IOW.to(device),
            self.suh_K.to(device),
            self.svh_N.to(device),
            self.codebook,
            None if self.bias_N is None else self.bias_N.to(device),
        )


def is_exl3(key: str, names: Container[str]) -> bool:
    """Whether the tensors of a module are stored as EXL3: a trellis and scales on both sides."""
    return f"{key}.trellis" in names and all(
        f"{key}.{scales}" in names or f"{key}.{signs}" in names
        for scales, signs in LEGACY_SIGNS.items()
    )


def marker_tensor(codebook: Codebook) -> Tensor:
    """The int32 scalar that names a codebook in a file; 3inst has none."""
    if codebook.multiplier is None:
        raise FormatError(f"codebook {codebook.value} has no marker tensor")
    return torch.tensor(codebook.multiplier - (1 << 32), dtype=torch.int32)


def check_exl3_tensor(key: str, weight: Exl3Tensor) -> None:
    """Check dtypes and shapes of a weight against each other.

    Raises:
        FormatError: names the tensor, what was found and what was expected.
    """
    trellis = weight.trellis_IOW
    _check(f"{key}.trellis", trellis, torch.int16, None)
    if trellis.dim() != 3:
        raise FormatError(
            f"{key}.trellis: shape is {tuple(trellis.shape)}, expected (k/16, n/16, 16*K)"
        )
    bits = bits_of_trellis(trellis.shape[2], f"{key}.trellis")
    if isinstance(bits, float) and weight.codebook is not Codebook.MUL1:
        raise FormatError(
            f"{key}.trellis: rate K = {bits} goes with codebook mul1 only, found "
            f"{weight.codebook.value}; the marker tensor is missing or the file is damaged"
        )
    for side, size in (("input", weight.in_features), ("output", weight.out_features)):
        if size == 0 or size % HADAMARD_BLOCK:
            raise FormatError(
                f"{key}.trellis: shape {tuple(trellis.shape)} has {size} {side} channels, "
                f"expected a positive multiple of {HADAMARD_BLOCK}"
            )
    _check(f"{key}.suh", weight.suh_K, torch.float16, (weight.in_features,))
    _check(f"{key}.svh", weight.svh_N, torch.float16, (weight.out_features,))
    if weight.bias_N is not None:
        _check(f"{key}.bias", weight.bias_N, torch.float16, (weight.out_features,))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    if tensor.dtype != dtype:
        raise FormatError(f"{name}: dtype is {tensor.dtype}, expected {dtype}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise FormatError(f"{name}: shape is {tuple(tensor.shape)}, expected {shape}")


def _required(key: str, suffix: str, tensors: Mapping[str, Tensor]) -> Tensor:
    name = f"{key}.{suffix}"
    if name not in tensors:
        raise FormatError(f"{name} is missing: an EXL3 weight needs trellis, suh and svh")
    return tensors[name]


def _scales(key: str, suffix: str, tensors: Mapping[str, Tensor]) -> Tensor:
    legacy = LEGACY_SIGNS[suffix]
    if f"{key}.{suffix}" in tensors and f"{key}.{legacy}" in tensors:
        raise FormatError(
            f"{key} has both {suffix} and {legacy}, scales of two conversions; remove the stale one"
        )
    if f"{key}.{legacy}" in tensors:
        return unpack_signs(f"{key}.{legacy}", tensors[f"{key}.{legacy}"])
    return _required(key, suffix, tensors)


def unpack_signs(name: str, packed: Tensor) -> Tensor:
    """Legacy signs: int16 ``(size / 16,)`` -> float16 ``(size,)`` of +-1.

    Bit i (from the least significant) of word j belongs to channel 16 j + i; a set bit is -1.
    """
    _check(name, packed, torch.int16, None)
    if packed.dim() != 1:
        raise FormatError(f"{name}: shape is {tuple(packed.shape)}, expected (size / 16,)")
    bits = (packed.to(torch.int32)[:, None] >> torch.arange(16, device=packed.device)) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)


def _codebook(key: str, tensors: Mapping[str, Tensor]) -> Codebook:
    found = [c for c in (Codebook.MCG, Codebook.MUL1) if f"{key}.{c.marker}" in tensors]
    if len(found) == 2:
        raise FormatError(f"{key} has both markers {key}.mcg and {key}.mul1, expected at most one")
    if not found:
        return Codebook.INST3
    name = f"{key}.{found[0].marker}"
    marker, expected = tensors[name], marker_tensor(found[0])
    is_scalar = marker.dtype == torch.int32 and marker.dim() == 0
    if is_scalar and int(marker) != int(expected):
        raise FormatError(
            f"{name}: marker value is {int(marker)}, expected {int(expected)}; the file uses a "
            f"multiplier that this format does not know"
        )
    return found[0]
