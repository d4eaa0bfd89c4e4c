"""A linear layer over a dense or an EXL3 weight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from exllamav3.codec.params import pad_to_block
from exllamav3.codec.tensor import EXL3_SUFFIXES, PAYLOAD, Exl3Tensor, is_exl3
from exllamav3.errors import FormatError
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.module import Module, TensorSource, count_weights, read_weight

LinearKind = Literal["bits", "head_bits", "mtp_bits"]
"""Which of a conversion's bit settings a linear follows."""


class Linear(Module):
    """`y = x W^T + b`, stored dense as `<key>.weight` or as an EXL3 group `<key>.trellis` ...

    What is stored decides: rate and codebook come from the tensors, never from the configuration.

    Args:
        key: dotted path.
        in_features, out_features: logical widths. An EXL3 weight is padded to 128 on both sides
            (`in_padded`, `out_padded`); `forward` zero-extends its input and trims its output.
        bias: whether the architecture has one; a tensor that contradicts this is an error.
        qmap: label of the input activation, shared by linears that share a Hessian; None for
            linears that are never quantized.
        qbits_key: which bit setting it follows when converted.
        qgroup: linears of one group get their bits together; its own key by default.
        alt_key: where the dense weight is when `key` has none (tied embeddings).
        out_dtype: of the output; None means the activation dtype.
    """

    def __init__(
        self,
        key: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        qmap: str | None = None,
        qbits_key: LinearKind | None = None,
        qgroup: str | None = None,
        alt_key: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(key)
        self.in_features, self.out_features = in_features, out_features
        self.in_padded, self.out_padded = pad_to_block(in_features), pad_to_block(out_features)
        self.has_bias = bias
        self.qmap, self.qbits_key, self.qgroup = qmap, qbits_key, qgroup or key
        self.alt_key, self.out_dtype = alt_key, out_dtype
        self.weight: Tensor | Exl3Tensor | None = None
        self.bias: Tensor | None = None

    def own_names(self, names: Collection[str]) -> tuple[str, ...]:
        """The EXL3 group if one is stored, else the dense weight, else that of `alt_key`."""
        bias = (f"{self.key}.bias",) if self.has_bias else ()
        if is_exl3(self.key, names):
            weights = tuple(n for s in EXL3_SUFFIXES if (n := f"{self.key}.{s}") in names)
            return weights + bias
        weight = f"{self.key}.weight"
        if weight not in names and f"{self.key}.trellis" in names:  # name what it lacks
            return (*(f"{self.key}.{suffix}" for suffix in PAYLOAD), *bias)
        if weight not in names and self.alt_key and f"{self.alt_key}.weight" in names:
            weight = f"{self.alt_key}.weight"
        return (weight, *bias)

    def load_own(self, source: TensorSource) -> None:
        """Read whichever form is stored; see `Module.load`."""
        names = source.names()
        if source.has(f"{self.key}.bias") != self.has_bias:
            raise FormatError(
                f"{self.key}.bias: {'missing' if self.has_bias else 'present'}, but the "
                f"architecture says that this linear has {'a' if self.has_bias else 'no'} bias"
            )
        if is_exl3(self.key, names):
            self._load_exl3(source)
        else:
            self._load_dense(source)

    def _load_exl3(self, source: TensorSource) -> None:
        if source.has(f"{self.key}.weight"):
            raise FormatError(
                f"{self.key}: both {self.key}.weight and {self.key}.trellis are stored; one weight "
                f"must have one form, remove the one that is stale"
            )
        names = self.own_names(source.names())
        weight = Exl3Tensor.from_tensors(self.key, {name: source.get(name) for name in names})
        found = (weight.in_features, weight.out_features)
        expected = (self.in_padded, self.out_padded)
        if found != expected:
            raise FormatError(
                f"{self.key}.trellis: holds a {found[0]} x {found[1]} matrix, but config.json asks "
                f"for {self.in_features} x {self.out_features}, padded {expected[0]} x "
                f"{expected[1]}; config.json and the tensors belong to different models"
            )
        assert self.device is not None
        self.weight, self.bias = weight.to(self.device), None

    def check_tied(self, source: TensorSource) -> None:
        """Compare a dense weight of its own with that of `alt_key`, where both are stored.

        Raises:
            FormatError: they differ, so one of the two would be lost.
        """
        names = (f"{self.key}.weight", f"{self.alt_key}.weight")
        if not all(map(source.has, names)):
            return
        # A head written by a converter is float16 where its embedding is BF16.
        own, shared = (source.get(name).half() for name in names)
        if not torch.equal(own, shared):
            raise FormatError(
                f"{names[0]}: differs from {names[1]}, but "
                f'config.json says "tie_word_embeddings": true; set it to false to use the '
                f"stored head, or remove the head tensor to use the embedding"
            )

    def _load_dense(self, source: TensorSource) -> None:
        shape = (self.out_features, self.in_features)
        weight: Tensor | None = None
        if source.has(f"{self.key}.weight"):
            weight, _ = read_weight(source, f"{self.key}.weight", shape, "weight")
        if self.alt_key and source.has(f"{self.alt_key}.weight"):
            shared, _ = read_weight(source, f"{self.alt_key}.weight", shape, "weight")
            self.check_tied(source)
            weight = shared
        if weight is None:
            raise FormatError(
                f"{self.key}: neither {self.key}.weight nor {self.key}.trellis with its scales is "
                f"stored" + (f", nor {self.alt_key}.weight" if self.alt_key else "")
            )
        self.weight = weight.to(self.device, self.dtype)
        if self.has_bias:
            bias, _ = read_weight(source, f"{self.key}.bias", (self.out_features,), "bias")
            self.bias = bias.to(self.device, self.dtype)

    def own_bytes(self, source: TensorSource, dtype: torch.dtype) -> int:
        """Those of the EXL3 group as it is held, or of a dense weight in the activation dtype."""
        if not is_exl3(self.key, source.names()):
            return super().own_bytes(source, dtype)
        vectors = self.in_padded + self.out_padded + (self.out_padded if self.has_bias else 0)
        return 2 * (count_weights(source, [f"{self.key}.trellis"]) + vectors)

    def unload_own(self) -> None:
        """Drop weight and bias."""
        self.weight = self.bias = None

    def get_tensors(self) -> dict[str, Tensor]:
        """The EXL3 group, or weight and bias in float16."""
        if isinstance(self.weight, Exl3Tensor):
            return self.weight.to_tensors(self.key)
        assert self.weight is not None
        tensors = {f"{self.key}.weight": self.weight.to(torch.float16)}
        if self.bias is not None:
            tensors[f"{self.key}.bias"] = self.bias.to(torch.float16)
        return tensors

    def pad_input(self, x: Tensor) -> Tensor:
        """Extend `(..., in_features)` by zeros to whole Hadamard blocks."""
        missing = self.in_padded - self.in_features
        return F.pad(x, (0, missing)) if missing else x

    def forward(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`(..., in_features)` to `(..., out_features)` of `out_dtype`.

        The result is contiguous unless the output width is padded.
        """
        if ctx.capture is not None and self.qmap is not None:
            ctx.capture.observe(self.qmap, self.key, x)
        out_dtype = self.out_dtype or self.dtype
        if isinstance(self.weight, Exl3Tensor):
            return self.weight.forward(self.pad_input(x), out_dtype)[..., : self.out_features]
        assert self.weight is not None
        return dense_linear(x, self.weight, self.bias, out_dtype)


def dense_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """`x W^T + b` with `(n, k)` weights, accumulated in float32, rounded once to `out_dtype`."""
    if out_dtype == weight.dtype:
        return F.linear(x.to(weight.dtype), weight, bias)
    if weight.is_cuda and out_dtype == torch.float32:
        # A float16 result would lose the residual stream's range before the cast.
        rows = x.to(weight.dtype).reshape(-1, x.shape[-1])
        y = torch.mm(rows, weight.t(), out_dtype=out_dtype).view(*x.shape[:-1], -1)
    else:
        y = F.linear(x.float(), weight.float()).to(out_dtype)
    return y if bias is None else y + bias.to(out_dtype)
