"""One token: the form that decoding runs. No branch on data and no synchronisation, so CUDA graphs can capture it.

Shapes and equations are those of ``linear_core.kernels.ops`` with T = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One decode step of S = diag(a) S + k vᵀ. q, k, log_decay: [B, 1, H, K]; v: [B, 1, H, V]; state: [B, H, K, V]."""
    query, key, value = _one(q), _one(k), _one(v)
    write = key.unsqueeze(-1) * value.unsqueeze(-2)
    if state is None:
        new = write
    elif log_decay is None:
        new = state.float() + write
    else:
        new = torch.addcmul(write, _one(log_decay).exp().unsqueeze(-1), state.float())
    return _read(query, new, scale, v), new


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One decode step of the gated delta rule. beta: [B, 1, H], the rest as above."""
    query, key, value, strength = _one(q), _one(k), _one(v), _one(beta).unsqueeze(-1)
    if state is None:
        new = key.unsqueeze(-1) * (strength * value).unsqueeze(-2)
    else:
        decayed = _one(log_decay).exp().unsqueeze(-1) * state.float()
        recalled = (key.unsqueeze(-2) @ decayed).squeeze(-2)
        new = torch.addcmul(decayed, key.unsqueeze(-1), (strength * (value - recalled)).unsqueeze(-2))
    return _read(query, new, scale, v), new


def _one(x: Tensor) -> Tensor:
    """The only token in float32. Raises ValueError when there are more."""
    if x.shape[1] != 1:
        raise ValueError(f"the step form takes one token, not {x.shape[1]} (shape {list(x.shape)}); use chunked")
    return x[:, 0].float()


def _read(query: Tensor, state: Tensor, scale: float, v: Tensor) -> Tensor:
    return (scale * (query.unsqueeze(-2) @ state).squeeze(-2)).to(v.dtype).unsqueeze(1)
