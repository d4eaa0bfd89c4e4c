"""A model: its module tree, its tensors, and the way from token ids to logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from exllamav3.architecture.decoder import build_decoder, build_mtp, model_facts
from exllamav3.architecture.table import read_spec
from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.config import Config
from exllamav3.model.declaration import read_topology
from exllamav3.model.devices import place_modules, resolve_device, resolve_devices
from exllamav3.model.leftovers import check_leftovers, check_markers
from exllamav3.model.params import context_of_shape, last_places, make_context
from exllamav3.modules.attention import Attention
from exllamav3.modules.context import ForwardContext, KvSpec, RecurrentSpec
from exllamav3.modules.gated_delta_net import GatedDeltaNet
from exllamav3.modules.module import Module, TensorSource
from exllamav3.topology import ModelFacts, ResolvedTopology

Progress = Callable[[int, int], None]
"""Called with (modules done, modules in all)."""


class Model:
    """A decoder-only model.

    Attributes:
        config: what it was made from.
        spec: the facts the tree was built from.
        topology: validated declaration of which blocks are fused, None where none is declared.
        modules: top-level modules in order: embedding, blocks, final norm, head.
        side_modules: modules that are stored and quantized, but not run (MTP).
        copied: prefixes of tensors that belong to the checkpoint and are neither (vision).
        device, dtype: where it is loaded and in which activation dtype; device is None before. Of
            several devices (see `devices`) it is the first.
    """

    def __init__(self, config: Config, topology: ResolvedTopology | None) -> None:
        """Use `from_config`; this takes a topology as proven."""
        self.config = config
        self.spec = read_spec(config)
        self.topology = topology
        fused = {row.layer for row in topology.rows if row.is_fused} if topology else set()
        self.modules = build_decoder(self.spec, fused)
        self.side_modules = build_mtp(self.spec)
        self.copied = self.spec.copied
        self.device: torch.device | None = None
        self.dtype = torch.float32
        self._segments: list[tuple[torch.device, list[Module]]] = []
        self._caches: WeakSet[Any] = WeakSet()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices its modules are on, in the order of a pass; none when it is not loaded."""
        return tuple(device for device, _ in self._segments)

    @classmethod
    def from_config(cls, config: Config, topology: ResolvedTopology | None = None) -> Model:
        """Build the module tree; no weight is read.

        Args:
            config: of the model folder.
            topology: which blocks are fused. None means what the checkpoint declares.

        Raises:
            UnsupportedError: the architecture, or something it uses, is not implemented.
            FormatError: a setting is wrong, or the tensor files contradict each other.
            TopologyError: the declaration does not describe this model or its tensors.
        """
        if topology is None:
            topology = read_topology(config, model_facts(read_spec(config)))
        return cls(config, topology)

    def facts(self) -> ModelFacts:
        """The attention modules a topology may and may not name."""
        return model_facts(self.spec)

    def walk(self) -> list[Module]:
        """Every module that runs, depth first."""
        return [module for top in self.modules for module in top]

    def attention_layers(self) -> list[Attention]:
        """The softmax attention modules in layer order."""
        return [module for module in self.walk() if isinstance(module, Attention)]

    def cache_specs(self) -> list[KvSpec | RecurrentSpec]:
        """What a cache has to store, in layer order."""
        return [m.cache_spec for m in self.walk() if isinstance(m, Attention | GatedDeltaNet)]

    def expect_cache(self, cache: Any) -> None:
        """Leave room for a cache when layers are split over devices; caches call this."""
        self._caches.add(cache)

    def set_qkv_route(self, route: str) -> None:
        """Let split q, k and v projections share one launch ("auto", the default) or not ("split").

        Raises:
            FormatError: there is no such route.
        """
        for module in self.attention_layers():
            module.set_qkv_route(route)

    def routes(self) -> dict[str, Counter[str]]:
        """How many passes of each attention module took which route, by its path."""
        return {module.key: Counter(module.routes) for module in self.attention_layers()}

    def unclaimed(self, names: Collection[str]) -> list[str]:
        """Names of tensors that no module reads and no prefix of `copied` covers."""
        claimed = {
            name
            for top in (*self.modules, *self.side_modules)
            for module in top
            for name in module.own_names(names)
        }
        return sorted(n for n in names if n not in claimed and not n.startswith(self.copied))

    def load(
        self,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        source: TensorSource | None = None,
        tensor_p: bool = False,
        progress: Progress | None = None,
        devices: Sequence[str | torch.device] | None = None,
        use_per_device: Sequence[float] | None = None,
    ) -> None:
        """Read all weights that run.

        Args:
            device: None means the GPU if there is one, else the CPU.
            dtype: of activations; None means float16 on a GPU and float32 on the CPU.
            source: where tensors come from; None means the folder of the configuration.
            tensor_p: spread every layer over GPUs; refused for now.
            progress: called after each top-level module.
            devices: GPUs to split the layers over, in place of `device`: each gets consecutive
                top-level modules. By default all are filled to the same share of their free
                memory, less `model.split.RESERVE_BYTES`, counting caches made before. What is
                loaded already takes its memory; `unload` it first.
            use_per_device: GiB of weights for each of `devices`, which are then filled one after
                the other.

        Raises:
            UnsupportedError: `tensor_p`, a device this build cannot serve, a model that does not
                fit on `devices`, or a stored dtype that cannot be computed with.
            FormatError: tensors are missing, have wrong shapes, or are ignored where that changes
                the results (see `model.leftovers`); arguments exclude each other.

        Warns:
            CheckpointWarning: tensors that belong to no part of the model are ignored.
        """
        if tensor_p:
            self._refuse_tensor_parallelism()
        if devices is None and use_per_device is not None:
            raise FormatError("use_per_device is given without the devices it is for")
        if devices is not None and device is not None:
            raise FormatError(f"device is {device!r} and devices {devices!r}; give one of them")
        targets = [resolve_device(device)] if devices is None else resolve_devices(devices)
        dtype = dtype or (torch.float32 if targets[0].type == "cpu" else torch.float16)
        if dtype not in (torch.float32, torch.float16):
            raise UnsupportedError(f"dtype {dtype}: activations are float32 or float16")
        tensors = source or self.config.files
        names = tensors.names()
        self._check_complete(names)
        check_leftovers(self.unclaimed(names), self.modules, self._where)
        if self.config.quantization is not None:
            check_markers(self.modules, names, self.config.quantization.codebook, self._where)
        if devices is None:
            places = targets * len(self.modules)
        else:
            places = place_modules(
                self.modules, tensors, self._caches, targets, use_per_device, dtype
            )
        for done, (module, target) in enumerate(zip(self.modules, places, strict=True), start=1):
            module.load(tensors, target, dtype)
            if progress is not None:
                progress(done, len(self.modules))
        self.device, self.dtype = places[0], dtype
        self._segments = [
            (device, [module for _, module in group])
            for device, group in groupby(
                zip(places, self.modules, strict=True), key=lambda pair: pair[0]
            )
        ]

    def unload(self) -> None:
        """Drop all weights."""
        for module in self.modules:
            module.unload()
        self.device = None
        self._segments = []

    def _refuse_tensor_parallelism(self) -> None:
        fused = self.topology.first_fused() if self.topology else None
        if fused is not None:
            raise UnsupportedError(
                f"tensor_p: {fused} stores q, k and v as one fused matrix, which cannot be spread "
                f"over devices; load without tensor_p, or convert with this layer split"
            )
        raise UnsupportedError(
            "tensor_p: tensor parallelism is not there yet; load without it, or split the layers "
            "over several GPUs with `devices`"
        )

    @property
    def _where(self) -> str:
        return str(self.config.directory or "source")

    def _check_complete(self, names: Collection[str]) -> None:
        missing = [name for module in self.modules for name in module.missing(names)]
        if missing:
            shown = ", ".join(missing[:6]) + (", ..." if len(missing) > 6 else "")
            raise FormatError(
                f"{self._where}: {len(missing)} tensors of "
                f"{self.config.architecture} are missing: {shown}" + self._hint(missing)
            )

    def _hint(self, missing: list[str]) -> str:
        if missing == ["lm_head.weight"]:
            return (
                '; a model whose head is its embedding says "tie_word_embeddings": true in '
                "config.json"
            )
        return "; config.json and the tensors belong to different models, or files are missing"

    @torch.inference_mode()
    def forward(self, ids: Tensor, params: Mapping[str, Any] | None = None) -> Tensor:
        """Logits of the next token at every place.

        Args:
            ids: int64 `(b, s)`, on any device.
            params: see `model.params.KNOWN`; empty or None means whole sequences and no cache.

        Returns:
            float32 `(b, s, vocab)`, the unpadded vocabulary, on the device of the head.

        Raises:
            FormatError: ids or params are malformed, or the model is not loaded.
        """
        if self.device is None:
            raise FormatError("the model is not loaded; call model.load() first")
        params = params or {}
        ctx = make_context(ids, params, self.device, self.config.vocab_size)
        x = ids
        for index, (device, modules) in enumerate(self._segments):
            if index:
                # Queued on both devices behind what makes x; the host does not wait.
                x, ctx = x.to(device, non_blocking=True), ctx.to(device)
            x = self._run(modules, x, ctx, params)
        return x

    @torch.inference_mode()
    def forward_segment(self, index: int, x: Tensor, params: Mapping[str, Any]) -> Tensor:
        """The part of a pass that runs on one device, for callers that cross the devices.

        Args:
            index: of the device in `devices`.
            x: int64 ids `(b, s)` for the first, else the result of the segment before
                `(b, s, hidden)`, on this device.
            params: as for `forward`, with what they hold on this device.

        Returns:
            What the next segment takes; the logits after the last.

        Raises:
            FormatError: ids or params are malformed, or the model is not loaded.
        """
        if not 0 <= index < len(self._segments):
            raise FormatError(
                f"segment {index} does not exist, the model is loaded on {len(self._segments)} "
                f"devices"
            )
        device, modules = self._segments[index]
        if index == 0:
            ctx = make_context(x, params, device, self.config.vocab_size)
        else:
            ctx = context_of_shape(x.shape[0], x.shape[1], params, device)
        return self._run(modules, x, ctx, params)

    def _run(
        self, modules: list[Module], x: Tensor, ctx: ForwardContext, params: Mapping[str, Any]
    ) -> Tensor:
        for module in modules:
            if module is self.modules[-1] and "last_tokens_only" in params:
                x = last_places(x, params["last_tokens_only"], ctx)
            x = module.forward(x, ctx)
        return x
