"""``hedgehog`` (arXiv 2402.04347): softmax feature maps, no decay, a normalised read.

S += φ(k) vᵀ, Z += φ(k);  read φ(q)ᵀS / φ(q)ᵀZ;  φ(x) = softmax(xW + b) ⊕ softmax(−xW − b), so K = D.
The state carries Z as its last column: values get a column of ones, V = D + 1, and the caller divides.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linear_core.kernels import gated_linear_attention
from linear_core.mechanisms.base import Mechanism


class FeatureMap(nn.Module):
    """One map per head: W [heads, D, D/2] starts at the rectangular identity, b [heads, D/2] at zero."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        half = head_dim // 2
        self.weight = nn.Parameter(torch.eye(head_dim, half, dtype=torch.float32).repeat(heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(heads, half, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, heads, D] → φ(x) of the same shape and dtype; the softmaxes in float32."""
        logits = torch.einsum("bthd,hdf->bthf", x, self.weight.to(x.dtype)).float() + self.bias
        return torch.cat((logits.softmax(-1), (-logits).softmax(-1)), dim=-1).to(x.dtype)


class Hedgehog(Mechanism):
    """Linear attention with learned feature maps, for q per query head and for k per key/value head."""

    normalised = True

    def __init__(self, shape, recipe) -> None:
        super().__init__(shape, recipe)
        if shape.head_dim % 2:
            raise ValueError(f"hedgehog needs an even head dimension, not {shape.head_dim}")
        self.value_size = shape.head_dim + 1
        self.q_map = FeatureMap(shape.heads, shape.head_dim)
        self.k_map = FeatureMap(shape.kv_heads, shape.head_dim)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """φ of q and of k, not L2-normalised."""
        return self.q_map(q), self.repeat(self.k_map(k))

    def values(self, v: Tensor) -> Tensor:
        """v with a last column of ones: [B, T, G, D] → [B, T, H, D + 1]."""
        return self.repeat(torch.cat((v, torch.ones_like(v[..., :1])), dim=-1))

    def parallel(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """o [B, T, H, D + 1]: φ(q)ᵀS and, last, the normaliser φ(q)ᵀZ."""
        return gated_linear_attention(q, k, v, None, state=state)
