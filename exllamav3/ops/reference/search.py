"""Tail-biting trellis search in torch: the executable specification of `quantize_tiles`.

A tile is a ring of 256 weights. A *state* (16 bit) chooses one codebook value;
consecutive states share 16 - K bits, the *node* between them: state s leads from node
s >> K to node s & (2^(16-K) - 1). The search looks for the closed walk of 256 states
whose values are nearest to the weights in the sum of squares.

    cost_t[out] = min over c of  cost_{t-1}[s >> K] + (value(s) - w_t)^2,
                  s = c << (16 - K) | out,  c = 0 .. 2^K - 1

Closing the ring. The cheapest walk along a line need not end where it began. So the
costs start free, warm up over the last `WARM_UP` positions of the ring, and only then
run over all of it: by position 0 they have a past, nearly the one that the ring gives
them. The walk traced back from the cheapest end enters the ring at some node; traced
back once more from that node, it nearly always enters there again and is closed. If
`MAX_ROUNDS` rounds do not close it, a second search starts and ends at the last node.

Arithmetic, the same on every CPU path, so that all of them return the same bits: values
and weights are scaled by 2^(7+K) and rounded to integers, costs are float32, a step is
one subtraction (exact) and one fused multiply-add (rounded once), of equal candidates
the smallest c wins, and the first of equally cheap nodes. CUDA kernels follow the same
plan with float16 costs: other walks, the same error.

Not covered: half-integer K, which is read but never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.ops.reference.codebook import codebook_values

RING = 256
WARM_UP = {1: 96, 2: 96, 3: 96, 4: 96, 5: 96, 6: 64, 7: 48, 8: 48}
"""Positions before the seam, by K: as good as a full first pass (docs/adr/0011)."""
MAX_ROUNDS = 5
WEIGHT_LIMIT = 64.0
"""Weights beyond it are searched as if they were there; no codebook value exceeds 4."""
_HISTORY_FLOATS = 1 << 24


class _Trellis:
    """Codebook of one rate, and the two moves of the search over a batch of tiles."""

    def __init__(self, bits: int, codebook: int, device: torch.device) -> None:
        self.bits, self.nodes, self.fan = bits, 1 << (16 - bits), 1 << bits
        self.scale = 2.0 ** (7 + bits)
        self.values = codebook_values(codebook).to(device).double()
        self.levels = torch.round(self.values * self.scale)
        self.fan_index = torch.arange(self.fan, device=device) << (16 - bits)

    def forward(self, cost_BN: Tensor, weight_B: Tensor) -> Tensor:
        """Costs of every node after one more weight."""
        # float64 holds difference, square and sum exactly; the one rounding is at the end
        step_BS = (self.levels - weight_B[:, None]).square_()
        step_BS.view(len(weight_B), self.nodes, self.fan).add_(cost_BN[:, :, None])
        return step_BS.view(len(weight_B), self.fan, self.nodes).amin(1).float()

    def back(self, node_B: Tensor, cost_BN: Tensor, weight_B: Tensor) -> Tensor:
        """State on the cheapest way to each node, from the costs before that weight."""
        state_BC = self.fan_index | node_B[:, None]
        step_BC = (self.levels[state_BC] - weight_B[:, None]).square_()
        step_BC += cost_BN.gather(1, state_BC >> self.bits)
        best = step_BC.float().argmin(1, keepdim=True)
        return state_BC.gather(1, best).squeeze(1)


def quantize_tiles(tiles: Tensor, bits: int, codebook: int) -> tuple[Tensor, Tensor]:
    """Nearest closed walk of every tile.

    Args:
        tiles: float32 ``(T, 256)`` in ring order, at codebook scale. A NaN counts as 0.
        bits: K, 1 to 8.
        codebook: 0 = 3inst, 1 = mcg, 2 = mul1.

    Returns:
        values float32 ``(T, 256)``, exact codebook values; states int16 ``(T, 256)``
        (bit patterns of uint16), each row a closed ring.
    """
    trellis = _Trellis(bits, codebook, tiles.device)
    finite = torch.nan_to_num(tiles.double(), nan=0.0).clamp(-WEIGHT_LIMIT, WEIGHT_LIMIT)
    weights = torch.round(finite * trellis.scale)
    batch = max(1, _HISTORY_FLOATS // (RING * trellis.nodes))
    states = torch.zeros(tiles.shape, dtype=torch.int64, device=tiles.device)
    for start in range(0, len(tiles), batch):
        states[start : start + batch] = _search(trellis, weights[start : start + batch])
    return trellis.values[states].float(), states.to(torch.int16)


def _search(trellis: _Trellis, weights: Tensor) -> Tensor:
    cost = weights.new_zeros((len(weights), trellis.nodes), dtype=torch.float32)
    for t in range(RING - WARM_UP[trellis.bits], RING):
        cost = trellis.forward(cost, weights[:, t])
    history = _run(trellis, weights, cost)

    node = history[RING].argmin(1)
    states = torch.zeros_like(weights, dtype=torch.int64)
    closed = torch.zeros_like(node, dtype=torch.bool)
    for _ in range(MAX_ROUNDS):
        walk = _trace(trellis, weights, history, node)
        states = torch.where(closed[:, None], states, walk)
        root = walk[:, 0] >> trellis.bits
        closed |= root == node
        node = root
        if closed.all():
            return states
    is_open = ~closed
    states[is_open] = _search_through(trellis, weights[is_open], node[is_open])
    return states


def _search_through(trellis: _Trellis, weights: Tensor, node: Tensor) -> Tensor:
    """Cheapest closed walk that passes the seam at a given node."""
    cost = torch.full((len(weights), trellis.nodes), torch.inf, device=weights.device)
    cost.scatter_(1, node[:, None], 0.0)
    return _trace(trellis, weights, _run(trellis, weights, cost), node)


def _run(trellis: _Trellis, weights: Tensor, cost: Tensor) -> list[Tensor]:
    """Costs before each position of the ring, and after the last."""
    history = [cost]
    for t in range(RING):
        history.append(trellis.forward(history[t], weights[:, t]))
    return history


def _trace(trellis: _Trellis, weights: Tensor, history: list[Tensor], node: Tensor) -> Tensor:
    """States of the cheapest walk that ends at a node."""
    states = torch.zeros_like(weights, dtype=torch.int64)
    for t in reversed(range(RING)):
        states[:, t] = trellis.back(node, history[t], weights[:, t])
        node = states[:, t] >> trellis.bits
    return states
