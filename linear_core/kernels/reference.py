"""The token loop that defines both state updates: slow and readable. Every other form is tested against it.

Shapes and equations are those of ``linear_core.kernels.ops``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """S = diag(a) S + k vᵀ, token by token; float64 inputs are computed in float64, all others in float32."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    S = _start(k, v, state, dtype)
    outputs = []
    for t in range(q.shape[1]):
        if log_decay is not None:
            S = log_decay[:, t].to(dtype).exp().unsqueeze(-1) * S
        S = S + k[:, t].to(dtype).unsqueeze(-1) * v[:, t].to(dtype).unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t].to(dtype), S))
    return torch.stack(outputs, dim=1).to(v.dtype), S


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Decay, then the delta correction against the decayed state, then the write."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    S = _start(k, v, state, dtype)
    outputs = []
    for t in range(q.shape[1]):
        S = log_decay[:, t].to(dtype).exp().unsqueeze(-1) * S
        key = k[:, t].to(dtype)
        recalled = torch.einsum("bhk,bhkv->bhv", key, S)
        correction = beta[:, t].to(dtype).unsqueeze(-1) * (v[:, t].to(dtype) - recalled)
        S = S + key.unsqueeze(-1) * correction.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t].to(dtype), S))
    return torch.stack(outputs, dim=1).to(v.dtype), S


def _start(k: Tensor, v: Tensor, state: Tensor | None, dtype: torch.dtype) -> Tensor:
    if state is not None:
        return state.to(dtype)
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
