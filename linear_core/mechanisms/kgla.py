"""``kgla``: gla with a deeper decay where the new key is: S = diag(a) (I − β diag(k∘k)) S + k vᵀ, no β on the write."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_core.mechanisms.base import BETA_BIAS, GATE_RANK, linear_with_bias, project
from linear_core.mechanisms.gla import GLA

LARGEST_ERASURE = 1 - 1e-6  # of βk², so that its logarithm is finite


class KGLA(GLA):
    """log-gate = logsigmoid(h W₁ W₂ + b) + log1p(−βk²), k the normalised key, β as in gdn."""

    def __init__(self, shape, recipe) -> None:
        super().__init__(shape, recipe)
        self.num_gate_inputs = GATE_RANK + shape.heads
        self.beta = linear_with_bias(shape.hidden, shape.heads, BETA_BIAS)

    def gate_inputs(self, h: Tensor) -> Tensor:
        """h W₁ ⊕ h W_β: 16 rank values and H logits a token."""
        return project(h, self.gate.down.weight, self.beta.weight)

    def gates(self, inputs: Tensor, k: Tensor) -> tuple[Tensor, None]:
        """(log-gate [B, T, H, D], None). The key's part is a decay too, so the state update is gla's."""
        rank, logits = inputs.split((GATE_RANK, self.heads), dim=-1)
        log_decay, _ = super().gates(rank, k)
        erased = torch.sigmoid(logits + self.beta.bias).unsqueeze(-1) * k.float().square()
        return log_decay + torch.log1p(-erased.clamp(max=LARGEST_ERASURE)), None
