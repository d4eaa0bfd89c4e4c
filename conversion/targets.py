"""What a job makes of each module: linears to quantize, and tensors to keep.

The layout is fixed before any weight is read. It is a function of the model
tree, the options and the resolved topology, so a resumed job finds it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from exllamav3.codec.bit_rate import HEAD, BitRate, bit_rate
from exllamav3.codec.params import Codebook, pad_to_block
from exllamav3.codec.tensor import PAYLOAD
from exllamav3.errors import ConversionError
from exllamav3.modules.linear import Linear
from exllamav3.modules.module import Module
from exllamav3.topology import COMPONENTS, FUSED_NAME, ResolvedTopology

from .allocation import BudgetedLinear, allocate_bits
from .options import UNQUANTIZED_BITS, ConversionOptions


@dataclass(frozen=True, slots=True)
class QuantTarget:
    """One EXL3 linear to make.

    key: output tensor prefix
    components: linears whose weights are concatenated along the outputs; usually one
    qmap: label of the calibration input, None for uncalibrated linears
    bits, codebook: of the trellis
    scale: output scale policy, "always", "never" or "auto"
    """

    key: str
    components: tuple[Linear, ...]
    qmap: str | None
    bits: int
    codebook: Codebook
    scale: str

    @property
    def in_features(self) -> int:
        return self.components[0].in_features

    @property
    def out_features(self) -> int:
        return sum(linear.out_features for linear in self.components)

    @property
    def weights(self) -> int:
        """Stored weights, both sides padded to 128."""
        return pad_to_block(self.in_features) * pad_to_block(self.out_features)

    @property
    def size_bytes(self) -> int:
        """Bytes of its output tensors, to within a bias and a marker."""
        vectors = pad_to_block(self.in_features) + pad_to_block(self.out_features)
        return self.weights * self.bits // 8 + 2 * vectors


@dataclass(frozen=True, slots=True)
class ModuleLayout:
    """One top-level module of the output, in output order.

    targets: linears to quantize
    kept: source tensors that are copied as they are, names unchanged
    halved: dense linears written as float16 under their own key: (linear, source weight name)
    """

    key: str
    targets: tuple[QuantTarget, ...]
    kept: tuple[str, ...]
    halved: tuple[Linear, ...]

    @property
    def needed(self) -> set[str]:
        """Names of the output tensors, without markers and biases."""
        payload = {f"{target.key}.{suffix}" for target in self.targets for suffix in PAYLOAD}
        return payload | set(self.kept) | {f"{linear.key}.weight" for linear in self.halved}


def allocate_model(blocks: Sequence[Module], options: ConversionOptions) -> dict[str, int]:
    """Rates of the budgeted linears of a decoder, by key.

    Args:
        blocks: all top-level modules in order.
    """
    stack = [module for module in blocks if _budgeted(module)]
    linears = [
        BudgetedLinear(
            linear.key, linear.in_padded * linear.out_padded, linear.qgroup, priority, layer
        )
        for layer, module in enumerate(stack)
        for linear, priority in _budgeted(module)
    ]
    return allocate_bits(linears, options.bits, len(stack))


def _budgeted(module: Module, inherited: int = 0) -> list[tuple[Linear, int]]:
    """Linears that share the budget, with the highest priority among their ancestors."""
    priority = max(inherited, module.q_priority)
    found: list[tuple[Linear, int]] = []
    if isinstance(module, Linear) and module.qmap is not None and module.qbits_key == "bits":
        found.append((module, priority))
    for child in module.modules:
        found.extend(_budgeted(child, priority))
    return found


def achieved_bits(layouts: Sequence[ModuleLayout]) -> BitRate:
    """Mean bits per stored weight as the linears will be written."""
    rated: list[tuple[str, int, float]] = []
    for layout in layouts:
        rated += [(target.key, target.weights, target.bits) for target in layout.targets]
        for linear in layout.halved:
            if linear.key == HEAD:
                rated.append((HEAD, linear.in_features * linear.out_features, UNQUANTIZED_BITS))
    return bit_rate(rated)


def module_layout(
    module: Module,
    names: Collection[str],
    bits: Mapping[str, int],
    options: ConversionOptions,
    topology: ResolvedTopology | None,
    calibrated: bool = True,
) -> ModuleLayout:
    """Sort the linears and tensors of one top-level module of the source.

    Args:
        module: all split, as the source stores it.
        names: tensor names of the source.
        bits: rates of the budgeted linears.
        calibrated: False for side models, whose linears get no Hessian and are left
            untouched at 16 bits.
    """
    targets: list[QuantTarget] = []
    kept: list[str] = []
    halved: list[Linear] = []
    fused: dict[str, list[Linear]] = {}
    for part in module:
        if not isinstance(part, Linear):
            kept.extend(part.own_names(names))
            continue
        rate = _rate(part, bits, options)
        parent = part.key.rpartition(".")[0]
        if part.qmap is None or rate == UNQUANTIZED_BITS:
            if calibrated:
                halved.append(part)
            else:
                kept.extend(part.own_names(names))
        elif topology is not None and topology.is_fused(parent) and part.qbits_key == "bits":
            if part.key.rpartition(".")[2] in COMPONENTS:
                fused.setdefault(parent, []).append(part)
                if len(fused[parent]) == 3:
                    targets.append(_fused_target(parent, fused[parent], topology))
            else:
                targets.append(_target(part, rate, options, topology, calibrated))
        else:
            targets.append(_target(part, rate, options, topology, calibrated))
    return ModuleLayout(module.key, tuple(targets), tuple(kept), tuple(halved))


def _rate(linear: Linear, bits: Mapping[str, int], options: ConversionOptions) -> int:
    if linear.qmap is None or linear.qbits_key is None:
        return UNQUANTIZED_BITS
    if linear.qbits_key == "bits":
        return bits[linear.key]
    return options.head_bits if linear.qbits_key == "head_bits" else options.mtp_bits


def _target(
    linear: Linear,
    rate: int,
    options: ConversionOptions,
    topology: ResolvedTopology | None,
    calibrated: bool,
) -> QuantTarget:
    codebook, scale = options.codebook, options.out_scales
    declared = topology.projection(linear.key) if topology is not None and calibrated else None
    if declared is not None:
        rate, codebook, scale = declared.bits, declared.codebook, declared.scale
    qmap = linear.qmap if calibrated else None
    return QuantTarget(linear.key, (linear,), qmap, rate, Codebook.from_name(codebook), scale)


def _fused_target(layer: str, linears: list[Linear], topology: ResolvedTopology) -> QuantTarget:
    """q, k and v of a fused block, in this order whatever the tree's order is."""
    ordered = tuple(sorted(linears, key=lambda part: COMPONENTS.index(part.key.rpartition(".")[2])))
    declared = topology.projection(f"{layer}.{FUSED_NAME}")
    labels = {linear.qmap for linear in ordered}
    if declared is None or len(labels) != 1:
        raise ConversionError(
            f"{layer}: cannot fuse q, k and v: their calibration inputs are "
            f"{sorted(map(str, labels))}, expected one; leave the block split"
        )
    return QuantTarget(
        f"{layer}.{FUSED_NAME}",
        ordered,
        ordered[0].qmap,
        declared.bits,
        Codebook.from_name(declared.codebook),
        declared.scale,
    )
