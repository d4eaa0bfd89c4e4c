"""The gated delta rule in plain torch, one token after the other.

Per v-head, with a state S of shape ``(dk, dv)``:

    S   <- exp(g_t) S
    S   <- S + k_t (beta_t (v_t - k_t^T S))^T
    o_t  = S^T q_t

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), equation 10.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over the tokens of a batch, in float32; see `ops.gated_delta_rule`."""
    repeats = v.shape[2] // q.shape[2]
    q_BSHK = q.float().repeat_interleave(repeats, dim=2)
    k_BSHK = k.float().repeat_interleave(repeats, dim=2)
    v_BSHV, decay_BSH, beta_BSH = v.float(), g.float().exp(), beta.float()
    state_BHKV = state.float().clone()
    outputs = torch.empty_like(v_BSHV, memory_format=torch.contiguous_format)
    for t in range(v.shape[1]):
        state_BHKV = state_BHKV * decay_BSH[:, t, :, None, None]
        recalled_BHV = (state_BHKV * k_BSHK[:, t, :, :, None]).sum(-2)
        delta_BHV = (v_BSHV[:, t] - recalled_BHV) * beta_BSH[:, t, :, None]
        state_BHKV = state_BHKV + k_BSHK[:, t, :, :, None] * delta_BHV[:, :, None, :]
        outputs[:, t] = (state_BHKV * q_BSHK[:, t, :, :, None]).sum(-2)
    return outputs.to(v.dtype), state_BHKV.contiguous()
