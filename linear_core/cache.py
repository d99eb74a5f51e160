"""The cache of a linearized model: constant size from the first token on (recipe section 2).

A layer keeps, per sequence: the state (float32), the first s keys and values, the last w of them raw with the gate
inputs of the same tokens (a token enters the state w steps late with its own gate and beta), and what the
convolution needs: 7 raw keys and values behind the window, 7 raw queries behind the current token.

Shape letters: R sequences, W = w + convolution tail, s sinks, H query heads, G key/value heads, D head dimension,
K × V state, F gate inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one layer's cache, and its two types."""

    window: int
    sinks: int
    tail: int
    heads: int
    kv_heads: int
    head_dim: int
    gate_inputs: int
    state: tuple[int, int] | None  # (K, V); None: no state
    dtype: torch.dtype


class LinearizedLayer(CacheLayerMixin):
    """One linearized layer's part. ``columns`` counts what transformers calls the sequence length, pads included."""

    is_compileable = False
    is_sliding = False
    is_croppable = False
    TENSORS = ("k", "v", "sink_k", "sink_v", "q_tail", "gate_inputs", "state")

    def __init__(self, shape: CacheShape, batch_size: int, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.columns = 0
        past, dim = shape.window + shape.tail, shape.head_dim
        zeros = lambda *size, dtype=shape.dtype: torch.zeros(batch_size, *size, dtype=dtype, device=device)  # noqa: E731
        self.k, self.v = zeros(past, shape.kv_heads, dim), zeros(past, shape.kv_heads, dim)
        self.sink_k, self.sink_v = zeros(shape.sinks, shape.kv_heads, dim), zeros(shape.sinks, shape.kv_heads, dim)
        self.q_tail = zeros(shape.tail, shape.heads, dim)
        self.gate_inputs = zeros(shape.window, shape.gate_inputs, dtype=torch.float32)
        self.state: Tensor | None = None
        if shape.state is not None:
            self.state = zeros(shape.heads, *shape.state, dtype=torch.float32)
        self.is_initialized = True
        self.dtype, self.device = shape.dtype, device

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name in self.TENSORS if (t := getattr(self, name)) is not None}

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by ``change(tensor)``."""
        for name, tensor in self.tensors().items():
            setattr(self, name, change(tensor))

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """What a full-attention layer would answer: transformers may ask the first layer for the others' mask.

        Takes the query length, or the older releases' cache positions.
        """
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Nothing: all tensors are made with the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        raise TypeError("a linearized layer's cache is written by its attention module, not through update()")

    def reset(self) -> None:
        self.columns = 0
        self.apply(torch.zeros_like)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.apply(lambda t: t.index_select(0, indices.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply(lambda t: t.repeat_interleave(repeats, 0))

    def crop(self, *args: object) -> None:
        raise ValueError("the cache of a linearized model cannot be cropped: a state does not forget; fork() it before")


class LinearizedCache(Cache):
    """Cache of a whole model: ``LinearizedLayer`` where a layer was linearized, a growing one where softmax stays.

    ``positions`` [B] counts each sequence's real tokens. ``fork()`` copies it for a shared prefix.
    """

    def __init__(self, shapes: list[CacheShape | None], batch_size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        layers = [DynamicLayer() if shape is None else LinearizedLayer(shape, batch_size, device) for shape in shapes]
        super().__init__(layers=layers)
        self.positions = torch.zeros(batch_size, dtype=torch.long, device=device)

    def advance(self, num_columns: int, num_tokens: Tensor | None) -> None:
        """After a pass of [B, T]: T columns, of which num_tokens [B] were real (None: all)."""
        self.positions = self.positions + (num_columns if num_tokens is None else num_tokens)
        for layer in self._linearized():
            layer.columns += num_columns

    def _linearized(self) -> list[LinearizedLayer]:
        return [layer for layer in self.layers if isinstance(layer, LinearizedLayer)]

    @property
    def batch_size(self) -> int:
        return self.positions.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held now, all layers and sequences; constant where no layer keeps softmax attention."""
        tensors = [t for layer in self._linearized() for t in layer.tensors().values()]
        for layer in self.layers:
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                tensors += [layer.keys, layer.values]
        return sum(t.numel() * t.element_size() for t in tensors) + self.positions.numel() * 8

    def fork(self) -> LinearizedCache:
        """An independent copy: what is done to it leaves this one alone."""
        return copy.deepcopy(self)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()
        self.positions = torch.zeros_like(self.positions)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was (beam search)."""
        super().reorder_cache(beam_idx)
        self.positions = self.positions.index_select(0, beam_idx.to(self.positions.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        super().batch_select_indices(indices)
        self.positions = self.positions.index_select(0, indices.to(self.positions.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times, side by side."""
        super().batch_repeat_interleave(repeats)
        self.positions = self.positions.repeat_interleave(repeats, 0)

    def crop(self, *args: object) -> None:
        raise ValueError("the cache of a linearized model cannot be cropped: a state does not forget; fork() it before")
