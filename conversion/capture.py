"""Collecting Hessians, and output sensitivities, while a block sees the calibration rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from exllamav3.codec.params import pad_to_block
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.mlp import GatedMlp
from exllamav3.modules.module import Module
from exllamav3.quant import HessianAccumulator


class HessianCapture:
    """One accumulator per input label, fed by the first linear that reports the label.

    q, k and v report the same activation under the same label: one is enough.
    """

    def __init__(
        self, labels: Collection[str], device: torch.device, mlps: Sequence[MlpSensitivity] = ()
    ) -> None:
        """`labels`: the inputs that targets need; others are ignored."""
        self.accumulators: dict[str, HessianAccumulator] = {}
        self.mlps = {mlp.first_key: mlp for mlp in mlps}
        self._labels = frozenset(labels)
        self._first_keys: dict[str, str] = {}
        self._device = device

    def observe(self, qmap: str, key: str, x: Tensor) -> None:
        """Add the rows of `x` `(..., in_features)`; called by linears during the forward pass."""
        if key in self.mlps:
            self.mlps[key].add(x)
        if qmap not in self._labels or self._first_keys.setdefault(qmap, key) != key:
            return
        if qmap not in self.accumulators:
            width = pad_to_block(x.shape[-1])
            self.accumulators[qmap] = HessianAccumulator(width, self._device)
        self.accumulators[qmap].add(x)

    def merge(self, other: HessianCapture) -> None:
        """Add what another device's rows gave."""
        for label, accumulator in other.accumulators.items():
            if label in self.accumulators:
                self.accumulators[label].merge(accumulator)
            else:
                self.accumulators[label] = accumulator
        for key, mlp in other.mlps.items():
            self.mlps[key].merge(mlp)

    def sensitivities(self) -> dict[str, Tensor]:
        """Sensitivity of each output of each gate and up projection, by linear key."""
        found: dict[str, Tensor] = {}
        for mlp in self.mlps.values():
            found.update(mlp.finish())
        return found


class MlpSensitivity:
    """How strongly an error in each gate or up output reaches the output of its MLP.

    For h_j = act(g_j) u_j the squared slopes act'(g_j)^2 u_j^2 (gate) and act(g_j)^2 (up) are
    averaged over tokens and multiplied by the squared norm of row j of the down projection.
    """

    def __init__(self, mlp: GatedMlp) -> None:
        self.mlp = mlp
        self.first_key = mlp.up_proj.key
        self.tokens = 0
        self.gate_sum: Tensor | None = None
        self.up_sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """`x` `(b, s, hidden)`: input of gate and up."""
        ctx = ForwardContext.uncached(x.shape[0], x.shape[1], x.device)
        gate = self.mlp.gate_proj.forward(x, ctx).float().flatten(0, -2)
        up = self.mlp.up_proj.forward(x, ctx).float().flatten(0, -2)
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        gate_sum = ((slope * up) ** 2).sum(0)
        up_sum = ((gate * sigmoid) ** 2).sum(0)
        self.gate_sum = gate_sum if self.gate_sum is None else self.gate_sum + gate_sum
        self.up_sum = up_sum if self.up_sum is None else self.up_sum + up_sum
        self.tokens += gate.shape[0]

    def merge(self, other: MlpSensitivity) -> None:
        """Add another device's sums."""
        if other.gate_sum is None or other.up_sum is None:
            return
        if self.gate_sum is None or self.up_sum is None:
            self.gate_sum, self.up_sum = other.gate_sum.cpu(), other.up_sum.cpu()
        else:
            self.gate_sum = self.gate_sum + other.gate_sum.to(self.gate_sum.device)
            self.up_sum = self.up_sum + other.up_sum.to(self.up_sum.device)
        self.tokens += other.tokens

    def finish(self) -> dict[str, Tensor]:
        """float32 `(intermediate,)` on the CPU for the gate's and the up projection's key."""
        if self.gate_sum is None or self.up_sum is None:
            return {}
        down = self.mlp.down_proj.weight
        assert isinstance(down, Tensor)
        reach = (down.float() ** 2).sum(0)
        return {
            self.mlp.gate_proj.key: (self.gate_sum / self.tokens * reach).cpu(),
            self.mlp.up_proj.key: (self.up_sum / self.tokens * reach).cpu(),
        }


def sensitive_mlps(module: Module, scales: Mapping[str, str]) -> list[MlpSensitivity]:
    """MLPs of a block whose gate or up projection has the policy "auto"."""
    return [
        MlpSensitivity(part)
        for part in module
        if isinstance(part, GatedMlp)
        and "auto" in (scales.get(part.gate_proj.key), scales.get(part.up_proj.key))
    ]


def use_output_scales(policy: str, weight_OI: Tensor, sensitivity_O: Tensor | None) -> bool:
    """Whether a linear gets output scales.

    "auto" is yes, except for gate and up projections where scales would raise the error that
    reaches the output of the MLP: E[s o] E[o] > E[s] E[o^2], with o the RMS of each output's
    weights. Scales lower the error in all and spend it in proportion to o, which hurts where the
    sensitive outputs are also the large ones. Source: docs/adr/0010, "The policy auto".

    Args:
        policy: "always", "never" or "auto".
        weight_OI: `(out, in)` unpadded.
        sensitivity_O: s, or None for linears it is not measured for.
    """
    if policy != "auto":
        return policy == "always"
    if sensitivity_O is None:
        return True
    o = weight_OI.double().pow(2).mean(1).sqrt().cpu()
    s = sensitivity_O.double()
    with_scales, without = (s * o).mean() * o.mean(), s.mean() * o.square().mean()
    return bool(with_scales <= without * (1 + 1e-9))  # equal up to rounding where o is even
