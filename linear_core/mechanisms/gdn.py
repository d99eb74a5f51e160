"""``gdn``: the gated delta rule with a gate per channel (Kimi Delta Attention, arXiv 2510.26692; the paper's GDN).
``gdn_scalar``: with one gate per head, the original Gated DeltaNet (arXiv 2412.06464).

S = (I − β k kᵀ) diag(a) S + β k vᵀ: decay first, then the delta correction against the decayed state, then the write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linear_core.kernels import gated_delta_rule, low_rank_delta_rule
from linear_core.mechanisms.base import BETA_BIAS, GATE_RANK, LowRankGate, Mechanism, linear_with_bias, only, project


class GDN(Mechanism):
    """log a = logsigmoid(h W₁ W₂ + b) per query head and channel; β = sigmoid(h W_β + b_β) per query head."""

    gate_per_channel = True

    def __init__(self, shape, recipe) -> None:
        super().__init__(shape, recipe)
        self.num_gate_inputs = GATE_RANK + shape.heads
        self.gate = LowRankGate(shape, recipe, shape.heads * (shape.head_dim if self.gate_per_channel else 1))
        self.beta = linear_with_bias(shape.hidden, shape.heads, BETA_BIAS)

    def gate_inputs(self, h: Tensor) -> Tensor:
        """h W₁ ⊕ h W_β: 16 rank values and H logits a token."""
        return project(h, self.gate.down.weight, self.beta.weight)

    def gates(self, inputs: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """(log a [B, T, H, D], β [B, T, H])."""
        rank, logits = inputs.split((GATE_RANK, self.heads), dim=-1)
        log_decay = self.gate(rank).unflatten(-1, (self.heads, -1))
        return log_decay.expand(*log_decay.shape[:-1], self.head_dim), torch.sigmoid(logits + self.beta.bias)

    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gated delta rule over all tokens."""
        return gated_delta_rule(q, k, v, log_decay, beta, state=state)

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor | None, written: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As in ``Mechanism``; a pass without a state never holds the gates of all channels in memory."""
        if state is not None or inputs is None:
            return super().update(q, k, v, inputs, written, state)
        rank, logits = inputs.split((GATE_RANK, self.heads), dim=-1)
        beta = only(written, torch.sigmoid(logits + self.beta.bias))
        q, k = self.features(q, k)
        return low_rank_delta_rule(q, k, self.values(v), rank, self.gate.up.weight, self.gate.up.bias, beta)


class GDNScalar(GDN):
    """One gate per query head, the same for all channels (W₂ [16, H]); log_decay is an expanded view."""

    gate_per_channel = False
