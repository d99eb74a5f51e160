"""What a mechanism is: the part of a linearized layer between adapted q, k, v and the merge (recipe sections 2 and 3).

Shape letters: B batch, T tokens, C hidden size, H query heads, G key/value heads, D head dimension, K and V key and
value features of the state, F gate inputs a token. Layout [B, T, H, ·]; the state is float32 [B, H, K, V].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_core.kernels import l2_normalise
from linear_core.models import Shape
from linear_core.recipe import Recipe

GATE_RANK = 16
BETA_BIAS = -1.0


class Mechanism(nn.Module, ABC):
    """A state update with its new parameters. Subclasses give ``parallel``, and gates or features where they have them.

    Masking is the caller's: a token that must not be written comes with k, v, beta and log_decay of zero, and a token
    is shifted by the window together with its own gate inputs. The read comes without 1/√D.
    """

    normalised = False  # True: values carry a last column of ones, whose read is the normaliser Z
    num_gate_inputs = 0  # F: what the cache keeps of each window token, so that it enters the state with its own gates

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        """Makes the new parameters, float32, with the recipe's start values; works under ``torch.device("meta")``."""
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = (
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
        )
        self.key_size = self.value_size = shape.head_dim

    def gate_inputs(self, h: Tensor) -> Tensor:
        """h: [B, T, C] → float32 [B, T, F], the few numbers of a token that its gates are made of."""
        return h.new_zeros(*h.shape[:2], 0, dtype=torch.float32)

    def gates(self, inputs: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """inputs: [B, T, F]; k: [B, T, H, K] from ``features``.

        Returns float32 (log_decay [B, T, H, K] ≤ 0 or None, beta [B, T, H] in (0, 1) or None).
        """
        return None, None

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q: [B, T, H, D], k: [B, T, G, D] → both [B, T, H, K]; L2-normalised over D, k repeated to the query heads."""
        return l2_normalise(q), self.repeat(l2_normalise(k))

    def values(self, v: Tensor) -> Tensor:
        """v: [B, T, G, D] → [B, T, H, V], repeated to the query heads."""
        return self.repeat(v)

    @abstractmethod
    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """All tokens at once, any T: (o [B, T, H, V] in v's dtype, the state after the last token)."""

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One token (T = 1). The kernels choose their one-token form by T, so this is ``parallel`` unless replaced."""
        return self.parallel(q, k, v, log_decay, beta, state)

    def update(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor | None, written: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The whole linear path behind the adaptation: features, values, gates, mask, and ``parallel`` or ``step``.

        q: [B, T, H, D]. k, v: [B, T, G, D] and inputs: [B, T, F], shifted by the window. written: bool [B or 1, T].
        state: None for a pass that starts empty and whose end nobody keeps: no token may then be unwritten between two
        written ones, so that there is nothing yet, or nothing more, for it to decay, and withholding its write is
        enough. With a state, everything of an unwritten token is zeroed and leaves it bit for bit.
        """
        q, k = self.features(q, k)
        v = self.values(v)
        log_decay, beta = (None, None) if inputs is None else self.gates(inputs, k)
        if state is not None:
            v = only(written, v)
            log_decay = None if log_decay is None else only(written, log_decay)
        if state is not None or beta is None:
            k = only(written, k)
        beta = None if beta is None else only(written, beta)
        run = self.step if q.shape[1] == 1 else self.parallel
        return run(q, k, v, log_decay, beta, state)

    def init_state(self, batch_size: int, device: torch.device | str) -> Tensor:
        """The empty state: float32 zeros [B, H, K, V]."""
        return torch.zeros(batch_size, self.heads, self.key_size, self.value_size, device=device)

    def repeat(self, x: Tensor) -> Tensor:
        """[B, T, G, ·] → [B, T, H, ·]: query head i reads key/value head i // (H / G)."""
        groups = self.heads // self.kv_heads
        return x if groups == 1 else x.repeat_interleave(groups, dim=2)


class LowRankGate(nn.Module):
    """log a = logsigmoid(h W₁ W₂ + b): W₁ [C, 16] without bias, W₂ [16, outputs], b starts at gate_bias."""

    def __init__(self, shape: Shape, recipe: Recipe, outputs: int) -> None:
        """outputs: log-gates a token, H·D for one per head and channel or H for one per head."""
        super().__init__()
        self.down = nn.Linear(shape.hidden, GATE_RANK, bias=False, dtype=torch.float32)
        self.up = linear_with_bias(GATE_RANK, outputs, recipe.gate_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: h W₁, float32 [B, T, 16] → log-gates [B, T, outputs] ≤ 0."""
        return F.logsigmoid(self.up(inputs))


def linear_with_bias(inputs: int, outputs: int, bias: float) -> nn.Linear:
    """A float32 nn.Linear with its default start, but for the bias."""
    linear = nn.Linear(inputs, outputs, dtype=torch.float32)
    nn.init.constant_(linear.bias, bias)
    return linear


def only(written: Tensor, x: Tensor) -> Tensor:
    """x: [B, T, …] with zeros where written [B or 1, T] is False."""
    return x.masked_fill(~written.view(*written.shape, *[1] * (x.dim() - 2)), 0)


def project(h: Tensor, *weights: Tensor) -> Tensor:
    """h: [B, T, C] times all weights [·, C] in one product → float32 [B, T, sum].

    The product is made in h's dtype (bf16 backbone, float32 parameters: mixed precision), what follows in float32.
    """
    stacked = torch.cat(weights) if len(weights) > 1 else weights[0]
    return F.linear(h, stacked.to(h.dtype)).float()
