"""Which form of a state update runs: CUDA → fla, one token → step, else chunked; or one by name.

Shape letters: B batch, T tokens, H heads, K key features, V value features.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from linear_core.kernels import chunked, fla, recurrent, reference, step

Implementation = Literal["reference", "chunked", "step", "fla", "recurrent"]
IMPLEMENTATIONS = {"reference": reference, "chunked": chunked, "step": step, "fla": fla, "recurrent": recurrent}
_forced: Implementation | None = None


@contextmanager
def forced(implementation: Implementation) -> Iterator[None]:
    """Within it, every state update of this process that names no implementation takes this one: for tests and benches."""
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    state: Tensor | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention with a decay per channel (recipe 3: hedgehog, gla, kgla).

    S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ,   o_t = scale · q_tᵀ S_t

    q, k: [B, T, H, K]. v: [B, T, H, V]. log_decay: [B, T, H, K] ≤ 0, or None for no decay. state: [B, H, K, V]
    float32, or None for zeros; it is not changed. Returns (o [B, T, H, V] in v's dtype, the state after the last
    token in float32). A token with k = log_decay = 0 leaves the state bit for bit. Raises ValueError on shapes that
    do not fit and on an unknown implementation.
    """
    _check(q, k, v, log_decay, None, state)
    form = IMPLEMENTATIONS[choose(q, implementation)]
    return form.gated_linear_attention(q, k, v, log_decay, state, scale)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    *,
    state: Tensor | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule with a decay per channel (recipe 3: gdn; Kimi Delta Attention, arXiv 2510.26692).

    S̄_t = diag(exp(log_decay_t)) S_{t-1},   S_t = S̄_t + β_t k_t (v_t − S̄_tᵀ k_t)ᵀ,   o_t = scale · q_tᵀ S_t

    Shapes as in ``gated_linear_attention``; beta: [B, T, H] in [0, 1], k of norm ≤ 1, log_decay not None. A token
    with k = β = log_decay = 0 leaves the state bit for bit. Raises ValueError on shapes that do not fit.
    """
    if log_decay is None or beta is None:
        raise ValueError("gated_delta_rule needs log_decay [B, T, H, K] (zeros for no decay) and beta [B, T, H]")
    _check(q, k, v, log_decay, beta, state)
    form = IMPLEMENTATIONS[choose(q, implementation)]
    return form.gated_delta_rule(q, k, v, log_decay, beta, state, scale)


def low_rank_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    beta: Tensor,
    *,
    state: Tensor | None = None,
    scale: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[Tensor, Tensor]:
    """``gated_delta_rule`` with log_decay = logsigmoid(inputs Wᵀ + b), whose gate never lies in memory in the fla form.

    inputs: float32 [B, T, R]. weight, bias: float32 [H·K, R] and [H·K], or [H, R] and [H] for one gate a head.
    """
    if choose(q, implementation) == "fla":
        _check(q, k, v, None, beta, state)
        return fla.low_rank_delta_rule(q, k, v, inputs, weight, bias, beta, state, scale)
    log_decay = F.logsigmoid(F.linear(inputs, weight, bias)).unflatten(-1, (q.shape[2], -1)).expand(q.shape)
    return gated_delta_rule(q, k, v, log_decay, beta, state=state, scale=scale, implementation=implementation)


def choose(q: Tensor, implementation: Implementation | None = None) -> Implementation:
    """The form that runs for q [B, T, H, K]: the one asked for or forced, else by device and T. ValueError if unknown."""
    implementation = implementation or _forced
    if implementation is None:
        implementation = "step" if q.shape[1] == 1 else "fla" if q.is_cuda else "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {implementation!r} is not known; allowed: {', '.join(IMPLEMENTATIONS)}")
    return implementation


def _check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
) -> None:
    batch, tokens, heads, size = q.shape
    fine = (
        tokens > 0
        and k.shape == q.shape
        and v.shape[:3] == q.shape[:3]
        and (log_decay is None or log_decay.shape == q.shape)
        and (beta is None or beta.shape == q.shape[:3])
        and (state is None or state.shape == (batch, heads, size, v.shape[-1]))
    )
    if not fine:
        given = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in given.items() if x is not None)
        raise ValueError(
            f"shapes do not fit: {shapes}; wanted q, k, log_decay [B, T, H, K], v [B, T, H, V], beta [B, T, H], "
            "state [B, H, K, V], T > 0"
        )
