"""Both state updates in chunks, in plain PyTorch: any T, any device, differentiable, computed in float32.

Inside a chunk the work is matrix products; only the state goes from chunk to chunk. Decays never leave [0, 1]: a pair
(i, j) is reached by halving the chunk until i and j lie on two sides of a middle m, where its decay splits into
(product over m ≤ l ≤ i) · (product over j < l < m). Both factors are products of decays, not quotients, so gates near
0 underflow to the 0 that they mean and nothing overflows, and no precision is lost to differences of long sums.

Shapes and equations are those of ``linear_core.kernels.ops``; C is the chunk size, N the number of chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens a chunk, the fastest of 16 to 128 on two CPU cores at T = 512 … 2048 (D = 64); the delta rule also solves a
# system of this size.
CHUNK = 64
DELTA_CHUNK = 32


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """S = diag(a) S + k vᵀ. Without decay the scores are one masked product."""
    tokens, dtype = q.shape[1], v.dtype
    queries, keys, values = (_to_chunks(x, chunk) for x in (q, k, v))
    if log_decay is None:
        scores, to_start, to_end, whole = (queries @ keys.mT).tril(), queries, keys, None
    else:
        decay = _to_chunks(log_decay, chunk).exp()
        scores, to_start, to_end, whole = decayed_scores(queries.unsqueeze(-2), keys, decay)
        scores = scores.squeeze(-2) + torch.diag_embed((queries * keys).sum(-1))
        to_start = to_start.squeeze(-2)
    starts, end = _carry(to_end.mT @ values, whole, _start(k, v, state))
    out = scores @ values + to_start @ starts
    return _from_chunks(out * scale, tokens, dtype), end


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    chunk: int = DELTA_CHUNK,
) -> tuple[Tensor, Tensor]:
    """The delta rule in its WY form (arXiv 2406.06484): what a chunk writes, u, solves a unit lower triangular system

    (I + diag(β) A) u = β (v − k̃ S),   A_ij = Σ_d k_i k_j decay(j→i) for j < i,   k̃ = k decayed from the chunk's start.
    """
    tokens, dtype = q.shape[1], v.dtype
    queries, keys, values, decay = (_to_chunks(x, chunk) for x in (q, k, v, log_decay))
    strength = _to_chunks(beta.unsqueeze(-1), chunk)
    scores, to_start, to_end, whole = decayed_scores(torch.stack((queries, keys), dim=-2), keys, decay.exp())
    q_scores, k_scores = scores.unbind(-2)
    q_start, k_start = to_start.unbind(-2)
    q_scores = q_scores + torch.diag_embed((queries * keys).sum(-1))
    right = strength * torch.cat((k_start, values), dim=-1)
    solved = torch.linalg.solve_triangular(strength * k_scores, right, upper=False, unitriangular=True)
    weights, fresh = solved.split((keys.shape[-1], values.shape[-1]), dim=-1)

    S, starts, written = _start(k, v, state), [], []
    for f, w, decayed, by in zip(*(x.unbind(2) for x in (fresh, weights, to_end.mT, whole.unsqueeze(-1)))):
        starts.append(S)
        written.append(f - w @ S)
        S = by * S + decayed @ written[-1]
    out = q_scores @ torch.stack(written, dim=2) + q_start @ torch.stack(starts, dim=2)
    return _from_chunks(out * scale, tokens, dtype), S


def decayed_scores(rows: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Products of rows with earlier keys, decayed in between: A_ij = Σ_d rows_i keys_j Π_{j<l≤i} decay_l; 0 for j ≥ i.

    rows: [..., C, R, K] (R kinds of row share the keys). keys, decay: [..., C, K], C a power of two. Returns
    (A [..., C, R, C], rows decayed from the chunk's start [..., C, R, K], keys decayed to its end [..., C, K], the
    chunk's whole decay [..., K]). Works upwards from blocks of one token; each round joins neighbours.
    """
    *lead, C, R, K = rows.shape
    left = (rows * decay.unsqueeze(-2)).reshape(-1, C, 1, R, K)  # rows, decayed from their block's start
    right = keys.reshape(-1, C, 1, K)  # keys, decayed to their block's end
    whole = decay.reshape(-1, C, K)  # decay of a whole block
    scores = rows.new_zeros(left.shape[0], C, 1, R, 1)
    size = 1
    while size < C:
        left1, left2 = _neighbours(left)
        right1, right2 = _neighbours(right)
        whole1, whole2 = _neighbours(whole)
        scores1, scores2 = _neighbours(scores)
        across = left2.flatten(2, 3) @ right1.mT
        lower = torch.cat((across.view(scores2.shape), scores2), dim=-1)
        scores = torch.cat((F.pad(scores1, (0, size)), lower), dim=2)
        left = torch.cat((left1, left2 * whole1[:, :, None, None]), dim=2)
        right = torch.cat((right1 * whole2[:, :, None], right2), dim=2)
        whole = whole1 * whole2
        size *= 2
    return scores.view(*lead, C, R, C), left.view(*lead, C, R, K), right.view(*lead, C, K), whole.view(*lead, K)


def _neighbours(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd blocks of [M, blocks, ...]."""
    first, second = blocks.unflatten(1, (-1, 2)).unbind(2)
    return first, second


def _carry(writes: Tensor, whole: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, H, N, K, V] and the last. writes: what each chunk adds, whole: its decay."""
    starts = []
    decays = [None] * writes.shape[2] if whole is None else whole.unsqueeze(-1).unbind(2)
    for write, decay in zip(writes.unbind(2), decays):
        starts.append(state)
        state = (state if decay is None else decay * state) + write
    return torch.stack(starts, dim=2), state


def _to_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ·] → float32 [B, H, N, C, ·], the last chunk filled with zeros: tokens that leave the state alone."""
    x = F.pad(x.float().transpose(1, 2), (0, 0, 0, -x.shape[1] % chunk))
    return x.unflatten(2, (-1, chunk))


def _from_chunks(x: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """[B, H, N, C, V] → [B, T, H, V] in the caller's dtype."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype)


def _start(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    if state is not None:
        return state.float()
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
