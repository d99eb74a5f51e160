"""How the exact path and the state's read become one output (recipe sections 2, 3 and 7).

Shape letters: R sequences, L tokens, H heads, D head dimension, C hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linear_core.models import Shape

SMALLEST_NORMALISER = 1e-6


def normalised_read(o: Tensor) -> tuple[Tensor, Tensor]:
    """A read whose last column is its normaliser → (read / normaliser [R, L, H, D], normaliser [R, L, H] float32)."""
    total = o[..., -1].float()
    return o[..., :-1] / total.clamp_min(SMALLEST_NORMALISER).unsqueeze(-1).to(o.dtype), total


class Merge(nn.Module):
    """One class a merge: ``forward(exact, lse, o, outside, h, q)`` → [R, L, H, D].

    exact: [R, L, H, D] or None without an exact path. lse: [R, L, H]. o: [R, L, H, V] the state's read without 1/√D.
    outside: [R, L] number of tokens that the state holds. h: [R, L, C] and q [R, L, H, D] after RoPE, for gates.
    paths: ``hybrid`` · ``exact`` (the state is not read) · ``linear`` (the hybrid's own read alone).
    """

    needs_hidden = False

    def __init__(self, shape: Shape, *, normalised: bool, learned_scale: bool) -> None:
        super().__init__()
        self.normalised = normalised
        self.fixed_scale = 1.0 if normalised or learned_scale else shape.head_dim**-0.5
        self.scale = nn.Parameter(torch.ones(shape.heads)) if learned_scale else None

    def read(self, o: Tensor) -> tuple[Tensor, Tensor | None]:
        """The state's contribution before weighing, and its normaliser where there is one."""
        total = None
        if self.normalised:
            o, total = normalised_read(o)
        if self.scale is not None:
            o = o * self.scale.to(o.dtype)[:, None]
        return o * self.fixed_scale if self.fixed_scale != 1.0 else o, total

    def share(self, lse: Tensor | None, outside: Tensor, h: Tensor, q: Tensor, total: Tensor | None) -> Tensor | None:
        """[R, L, H] weight of the read, 1 − it the exact path's; None: both count whole (a plain sum)."""
        return None

    def forward(
        self, exact: Tensor | None, lse: Tensor | None, o: Tensor, outside: Tensor, h: Tensor, q: Tensor, paths: str
    ) -> Tensor:
        if paths == "exact":
            return torch.zeros_like(q) if exact is None else exact
        read, total = self.read(o)
        if exact is None:
            return read
        share = self.share(lse, outside, h, q, total)
        if share is None:
            return read if paths == "linear" else exact + read
        share = share.to(read.dtype).unsqueeze(-1)
        return share * read if paths == "linear" else (1 - share) * exact + share * read


class SumMerge(Merge):
    """The paper's: ``exact + qᵀS/√D``, no gate and no shared normaliser."""


class SharedMerge(Merge):
    """Hedgehog's: one normaliser over both paths. The read's share is φ(q)ᵀZ / (φ(q)ᵀZ + Σ_I exp l), in log space."""

    def share(self, lse: Tensor | None, outside: Tensor, h: Tensor, q: Tensor, total: Tensor | None) -> Tensor | None:
        assert lse is not None and total is not None
        share = torch.sigmoid(total.clamp_min(SMALLEST_NORMALISER).log() - lse)
        return torch.where(outside[..., None] > 0, share, 0.0)


class MassMerge(Merge):
    """The softmax mass outside the window, predicted: ``m = sigmoid(u·h + a·q/√D − lse + log n)`` (recipe section 7).

    u [H, C] and a [H, D] start at 0, the read's scale c [H] at 1. n = 0 means m = 0 exactly.
    """

    needs_hidden = True

    def __init__(self, shape: Shape, *, normalised: bool, learned_scale: bool) -> None:
        super().__init__(shape, normalised=normalised, learned_scale=True)
        self.hidden = nn.Parameter(torch.zeros(shape.heads, shape.hidden))
        self.query = nn.Parameter(torch.zeros(shape.heads, shape.head_dim))

    def share(self, lse: Tensor | None, outside: Tensor, h: Tensor, q: Tensor, total: Tensor | None) -> Tensor | None:
        assert lse is not None
        logit = h.float() @ self.hidden.t() + (q.float() * self.query).sum(-1) * q.shape[-1] ** -0.5
        logit = logit - lse + outside.clamp_min(1).float().log()[..., None]
        return torch.where(outside[..., None] > 0, logit.sigmoid(), 0.0)


MERGE_CLASSES = {"sum": SumMerge, "shared": SharedMerge, "mass": MassMerge}
