"""``none``: no state. The exact path alone, the baseline that every report needs."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_core.mechanisms.base import Mechanism


class NoState(Mechanism):
    """No parameters, an empty state, and a read of zero."""

    def __init__(self, shape, recipe) -> None:
        super().__init__(shape, recipe)
        self.key_size = self.value_size = 0

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing reads them: q and k as they are, k repeated."""
        return q, self.repeat(k)

    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """o = 0 [B, T, H, D], and the empty state [B, H, 0, 0]."""
        return torch.zeros_like(v), self.init_state(v.shape[0], v.device) if state is None else state
