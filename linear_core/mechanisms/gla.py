"""``gla`` (gated linear attention, arXiv 2312.06635): S = diag(a) S + k vᵀ, a per query head and channel."""

from __future__ import annotations

from torch import Tensor

from linear_core.kernels import gated_linear_attention
from linear_core.mechanisms.base import GATE_RANK, LowRankGate, Mechanism, project


class GLA(Mechanism):
    """log a = logsigmoid(h W₁ W₂ + b)."""

    num_gate_inputs = GATE_RANK

    def __init__(self, shape, recipe) -> None:
        super().__init__(shape, recipe)
        self.gate = LowRankGate(shape, recipe, shape.heads * shape.head_dim)

    def gate_inputs(self, h: Tensor) -> Tensor:
        """h W₁: the 16 rank values of each token."""
        return project(h, self.gate.down.weight)

    def gates(self, inputs: Tensor, k: Tensor) -> tuple[Tensor, None]:
        """(log a [B, T, H, D], None)."""
        return self.gate(inputs).unflatten(-1, (self.heads, self.head_dim)), None

    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Decay, then write, then read."""
        return gated_linear_attention(q, k, v, log_decay, state=state)
