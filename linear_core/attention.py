"""The one attention module: project → adapt → exact path + linear path → merge → o_proj (recipe section 2).

It is mixed into the base model's own attention class, so that its frozen projections, norms and rotation stay the
base's and no family needs a copy.

Shape letters: B batch, T tokens, R sequences, L tokens of a sequence in this pass, C hidden, H query heads,
G key/value heads, D head dimension, W = window + convolution tail, F gate inputs, K × V state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from linear_core.adaptation import Convolutions
from linear_core.cache import CacheShape, LinearizedLayer
from linear_core.exact import exact_attention
from linear_core.layout import Layout
from linear_core.mechanisms import mechanism_class
from linear_core.mechanisms.base import Mechanism
from linear_core.merge import MERGE_CLASSES, Merge
from linear_core.models import Shape
from linear_core.recipe import Recipe

Projected = tuple[Tensor, Tensor, Tensor]  # q [B, T, H, D], k and v [B, T, G, D], normalised and rotated


class LinearizedAttention(nn.Module):
    """Mixed in front of a transformers attention class by ``linear_core.convert``; ``install`` adds what is new."""

    # of the base class
    layer_idx: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    # of ours
    NEW = ("mechanism", "convolutions", "merge")
    recipe: Recipe
    mechanism: Mechanism
    convolutions: Convolutions | None
    merge: Merge

    def install(self, shape: Shape, recipe: Recipe) -> None:
        """Add the new parameters (float32, on the module's device)."""
        self.recipe = recipe
        self.mechanism = mechanism_class(recipe.mechanism)(shape, recipe)
        self.convolutions = Convolutions(shape, recipe.conv_kernel) if recipe.adaptation == "conv" else None
        self.merge = MERGE_CLASSES[recipe.merge](
            shape, normalised=self.mechanism.normalised, learned_scale=recipe.learned_read_scale
        )

    def uninstall(self) -> None:
        for name in (*self.NEW, "recipe"):
            delattr(self, name)

    def new_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        for name in self.NEW:
            if (module := getattr(self, name)) is not None:
                yield from module.named_parameters(prefix=name)

    @property
    def tail(self) -> int:
        """Entries before an output that the convolution needs."""
        return self.recipe.conv_kernel - 1 if self.convolutions is not None else 0

    @property
    def has_state(self) -> bool:
        return self.recipe.mechanism != "none"

    def cache_shape(self) -> CacheShape:
        """Sizes of this layer's cache for one sequence."""
        heads, kv_heads = (p.weight.shape[0] // self.head_dim for p in (self.q_proj, self.k_proj))
        state = None
        if self.has_state:
            *_, key_size, value_size = self.mechanism.init_state(1, torch.device("meta")).shape
            state = (key_size, value_size)
        return CacheShape(
            window=self.recipe.window, sinks=self.recipe.sinks, tail=self.tail, heads=heads, kv_heads=kv_heads,
            head_dim=self.head_dim, gate_inputs=self.mechanism.num_gate_inputs, state=state, dtype=self.q_proj.weight.dtype,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        *,
        layout: Layout,
        projected: Projected | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [B, T, C] → (attention output after o_proj [B, T, C], None). projected: as in ``mix``."""
        if layout.paths == "base":
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        y = self.mix(hidden_states, position_embeddings, layout, projected)
        return self.o_proj(y.flatten(-2)), None

    def mix(
        self, h: Tensor, position_embeddings: tuple[Tensor, Tensor], layout: Layout, projected: Projected | None = None
    ) -> Tensor:
        """Everything between the norm and o_proj. h: [B, T, C] → [B, T, H, D]. projected: what ``project`` makes of h,
        where it is there already (cells of one base share it)."""
        q, k, v = projected or self.project(h, position_embeddings)
        gate_inputs = self.mechanism.gate_inputs(h) if self.mechanism.num_gate_inputs else None
        q, k, v = layout.gather(q), layout.gather(k), layout.gather(v)
        h = layout.gather(h) if self.merge.needs_hidden else h
        if gate_inputs is not None:
            gate_inputs = layout.gather(gate_inputs)
        layer = None if layout.cache is None else layout.cache.layers[self.layer_idx]
        y = self.attend(q, k, v, gate_inputs, h, layout, layer)
        return layout.scatter(y)

    def project(self, h: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Projected:
        """h: [B, T, C] → q [B, T, H, D], k, v [B, T, G, D], normalised where the family does, rotated."""
        q, k, v = (p(h).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)  # type: ignore[operator]
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        return q, k, v

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate_inputs: Tensor | None,
        h: Tensor,
        layout: Layout,
        layer: LinearizedLayer | None,
    ) -> Tensor:
        """The two paths and their merge on left-aligned rows. q: [R, L, H, D], k, v: [R, L, G, D] → [R, L, H, D]."""
        k_all, v_all = self._behind(k, layer and layer.k), self._behind(v, layer and layer.v)
        sinks = self.recipe.sinks
        sink_k = _sinks(k, sinks, layer and layer.sink_k, layout.past)
        sink_v = _sinks(v, sinks, layer and layer.sink_v, layout.past)
        exact, lse = self._read_exact(q, k_all, v_all, sink_k, sink_v, layout)
        if not self.has_state or (layout.paths == "exact" and layer is None):
            y = exact if exact is not None else torch.zeros_like(q)
            state, gates_all = None, None
        else:
            gates_all = self._behind_gates(gate_inputs, layer)
            o, outside, state = self._read_state(q, k_all, v_all, gates_all, layout, layer)
            y = self.merge(exact, lse, o, outside, h, q, layout.paths)
        if layer is not None:
            self._remember(layer, layout.num_tokens, q, k_all, v_all, gates_all, sink_k, sink_v, state)
        return y

    def _read_exact(
        self,
        q: Tensor,
        k_all: Tensor,
        v_all: Tensor,
        sink_k: Tensor,
        sink_v: Tensor,
        layout: Layout,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Window and sinks → (o [R, L, H, D], log-sum-exp [R, L, H]), or two None without a budget."""
        window = self.recipe.window
        if not window:
            return None, None
        near = slice(k_all.shape[1] - q.shape[1] - window + 1, None)  # the w − 1 tokens before this pass, and its own
        return exact_attention(q, k_all[:, near], v_all[:, near], sink_k, sink_v, window=window, past=layout.past)

    def _behind(self, x: Tensor, past: Tensor | None) -> Tensor:
        """x: [R, L, G, D] → [R, W + L, G, D] with the W entries before this pass in front (zero where there are none)."""
        if past is not None:
            return torch.cat([past, x], dim=1)
        return functional.pad(x, (0, 0, 0, 0, self.recipe.window + self.tail, 0))

    def _behind_gates(self, gate_inputs: Tensor | None, layer: LinearizedLayer | None) -> Tensor | None:
        """[R, L, F] → [R, w + L, F]."""
        if gate_inputs is None:
            return None
        if layer is not None:
            return torch.cat([layer.gate_inputs, gate_inputs], dim=1)
        return functional.pad(gate_inputs, (0, 0, self.recipe.window, 0))

    def _read_state(
        self,
        q: Tensor,
        k_all: Tensor,
        v_all: Tensor,
        gates_all: Tensor | None,
        layout: Layout,
        layer: LinearizedLayer | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the tokens that leave the window, then read. → (o [R, L, H, V], outside [R, L], state [R, H, K, V])."""
        length, tail = q.shape[1], self.tail
        # query j meets the token w before it: the delay is a slice of the sequence with its past in front
        k, v = k_all[:, : tail + length], v_all[:, : tail + length]
        if self.convolutions is not None:
            before = layer.q_tail if layer is not None else q.new_zeros(q.shape[0], tail, *q.shape[2:])
            q = self.convolutions.q(torch.cat([before, q], dim=1))
            k, v = self.convolutions.k(k), self.convolutions.v(v)
        inputs = None if gates_all is None else gates_all[:, :length]
        outside, written = self._outside(q, layout)
        o, state = self.mechanism.update(q, k, v, inputs, written, None if layer is None else layer.state)
        return self._frozen(o, layout), outside, state

    def _outside(self, q: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """How many tokens the state holds at each query, and whether the query's pass writes one. Both [R or 1, L]."""
        position = torch.arange(q.shape[1], device=q.device)[None]
        real = True if layout.num_tokens is None else position < layout.num_tokens[:, None]
        if layout.past is not None:
            position = position + layout.past[:, None]
        outside = (position + 1 - self.recipe.window - self.recipe.sinks).clamp_min(0)
        written = (outside > 0) & real
        if layout.state_frozen_from is not None:
            outside = torch.where(position < layout.state_frozen_from, outside, 0)
        return outside, written

    def _frozen(self, o: Tensor, layout: Layout) -> Tensor:
        """Reads of zero from ``state_frozen_from`` on (attribution, recipe section 6)."""
        if layout.state_frozen_from is None:
            return o
        position = torch.arange(o.shape[1], device=o.device)[None] + (
            0 if layout.past is None else layout.past[:, None]
        )
        return o.masked_fill((position >= layout.state_frozen_from)[..., None, None], 0)

    def _remember(
        self,
        layer: LinearizedLayer,
        num_tokens: Tensor | None,
        q: Tensor,
        k_all: Tensor,
        v_all: Tensor,
        gates_all: Tensor | None,
        sink_k: Tensor,
        sink_v: Tensor,
        state: Tensor | None,
    ) -> None:
        size = self.recipe.window + self.tail
        layer.k, layer.v = _last(k_all, size, num_tokens), _last(v_all, size, num_tokens)
        if self.tail:
            layer.q_tail = _last(torch.cat([layer.q_tail, q], dim=1), self.tail, num_tokens)
        if gates_all is not None:
            layer.gate_inputs = _last(gates_all, self.recipe.window, num_tokens)
        layer.sink_k, layer.sink_v = sink_k, sink_v
        if state is not None:
            layer.state = state


def _last(x: Tensor, size: int, num_tokens: Tensor | None) -> Tensor:
    """The ``size`` entries up to each row's last real token. x: [R, size + L, …] → [R, size, …]."""
    if num_tokens is None:
        return x[:, x.shape[1] - size :].clone()
    index = num_tokens[:, None] + torch.arange(size, device=x.device)
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def _sinks(x: Tensor, sinks: int, kept: Tensor | None, past: Tensor | None) -> Tensor:
    """The first s tokens of each sequence as far as seen. x: [R, L, G, D], kept: [R, s, G, D] → [R, s, G, D]."""
    if kept is None or past is None:
        return functional.pad(x[:, :sinks], (0, 0, 0, 0, 0, max(0, sinks - x.shape[1])))
    index = torch.arange(sinks, device=x.device) - past[:, None]
    here = (index >= 0) & (index < x.shape[1])
    fresh = x[torch.arange(x.shape[0], device=x.device)[:, None], index.clamp(0, x.shape[1] - 1)]
    return torch.where(here[..., None, None], fresh, kept)
