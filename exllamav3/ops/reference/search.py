"""Tail-biting trellis search in torch: the executable specification of `quantize_tiles`.

A tile is a ring of 256 weights. A *state* (16 bit) chooses one codebook value;
consecutive states share 16 - K bits, the *node* between them: state s leads from node
s >> K to node s & (2^(16-K) - 1). The search looks for the closed walk of 256 states
whose values are nearest to the weights in the sum of squares.

    cost_t[out] = min over c of  cost_{t-1}[s >> K] + (value(s) - w_t)^2,
                  s = c << (16 - K) | out,  c = 0 .. 2^K - 1

Closing the ring. The cheapest walk through a line need not end where it began. So the
costs run once around the ring and then over its first `OVERLAP` positions again, which
by then have a past. A trace back around the ring, started a little after that seam,
nearly always enters the seam at the node where it leaves it: the ring is closed, and
cheaper on average than if its end were chosen in advance. Where it is not after
`MAX_ROUNDS` rounds, a second search starts and ends at the last node seen there.

Arithmetic, the same on every path (kernels included), so that all of them return the
same bits: values and weights are scaled by 2^(7+K) and rounded to integers, costs are
float32, a step is one subtraction (exact) and one fused multiply-add (rounded once),
of equal candidates the smallest c wins, and the first of equally cheap nodes.

Not covered: half-integer K, which is read but never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exllamav3.ops.reference.codebook import codebook_values

RING = 256
OVERLAP = {1: 96, 2: 96, 3: 96, 4: 96, 5: 64, 6: 64, 7: 32, 8: 32}
"""Positions searched a second time. Longer is better and slower; docs/adr has the measurements."""
LEAD = 64
"""Positions after the seam where a trace back starts, to have forgotten its start at the seam."""
MAX_ROUNDS = 3
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
    overlap = OVERLAP[trellis.bits]
    cost = weights.new_zeros((len(weights), trellis.nodes), dtype=torch.float32)
    history: list[Tensor] = [cost] * RING  # history[t]: costs after position t
    for step in range(RING + overlap):
        cost = history[step % RING] = trellis.forward(cost, weights[:, step % RING])

    seam = overlap - 1
    node = history[seam + LEAD].argmin(1)
    for t in range(seam + LEAD, seam, -1):
        node = trellis.back(node, history[t - 1], weights[:, t]) >> trellis.bits
    states = torch.zeros_like(weights, dtype=torch.int64)
    closed = torch.zeros_like(node, dtype=torch.bool)
    for _ in range(MAX_ROUNDS):
        start = node
        walk = torch.zeros_like(states)
        for step in range(RING):
            t = (seam - step) % RING
            walk[:, t] = trellis.back(node, history[t - 1], weights[:, t])
            node = walk[:, t] >> trellis.bits
        states = torch.where(closed[:, None], states, walk)
        closed |= node == start
        if closed.all():
            return states
    open_ = ~closed
    states[open_] = _search_from(trellis, weights[open_], node[open_], overlap)
    return states


def _search_from(trellis: _Trellis, weights: Tensor, node: Tensor, start: int) -> Tensor:
    """Cheapest closed walk through a given node before position `start`."""
    cost = torch.full((len(weights), trellis.nodes), torch.inf, device=weights.device)
    cost.scatter_(1, node[:, None], 0.0)
    history = []
    for step in range(RING):
        history.append(cost)
        cost = trellis.forward(cost, weights[:, (start + step) % RING])
    states = torch.zeros_like(weights, dtype=torch.int64)
    for step in reversed(range(RING)):
        t = (start + step) % RING
        states[:, t] = trellis.back(node, history[step], weights[:, t])
        node = states[:, t] >> trellis.bits
    return states
