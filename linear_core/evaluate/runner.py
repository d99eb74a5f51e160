"""One face for plain and linearized models: forward passes with only the logits asked for, and caches that fork.

Shape letters: B rows, T tokens, N logit rows asked for, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Runner:
    """Runs a causal model without gradients. ``switches`` go to every forward of a linearized model (attribution)."""

    def __init__(self, model: PreTrainedModel, *, switches: dict[str, Any] | None = None) -> None:
        self.model = model
        self.switches = switches or {}
        self.linearized = hasattr(model, "new_cache")
        # transformers calls it ``cache`` from 5.24 on, ``past_key_values`` before
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @property
    def stateful(self) -> bool:
        """Whether a cache is of constant size, with rows that need not be of one length: no softmax layer is left."""
        return self.linearized and not self.model._has_softmax_layers

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, batch_size: int) -> Any:
        """An empty cache for ``batch_size`` rows."""
        if self.linearized:
            return self.model.new_cache(batch_size)  # type: ignore[operator]
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def select(self, cache: Any, rows: list[int]) -> Any:
        """A cache whose row i is a copy of row ``rows[i]``; the original stays as it is.

        Only where ``stateful`` may ``cache`` have more than one row: growing layers hold rows of one length.
        """
        selected = copy.copy(cache)
        selected.layers = [copy.copy(layer) for layer in cache.layers]
        index = torch.tensor(rows, device=self.device)
        for layer in selected.layers:
            if getattr(layer, "keys", None) is not None:  # a growing layer
                layer.keys = layer.keys.expand(len(rows), -1, -1, -1)  # a view: the first update makes the copy
                layer.values = layer.values.expand(len(rows), -1, -1, -1)
            else:
                layer.batch_select_indices(index)
        if self.linearized:
            selected.positions = cache.positions[index]
        return selected

    def join(self, caches: list[Any]) -> Any:
        """One cache of all their rows, in order; only where ``stateful``."""
        if len(caches) == 1:
            return caches[0]
        joined = copy.copy(caches[0])
        joined.layers = []
        for parts in zip(*(cache.layers for cache in caches)):
            layer = copy.copy(parts[0])
            for name in layer.tensors():
                setattr(layer, name, torch.cat([getattr(part, name) for part in parts]))
            joined.layers.append(layer)
        joined.positions = torch.cat([cache.positions for cache in caches])
        return joined

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes of cache and activations that one row of this many tokens takes in a forward pass, roughly."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 + 8 * config.intermediate_size
        return num_tokens * per_token * self.model.dtype.itemsize

    @contextlib.contextmanager
    def _only(self, rows: Tensor | None, columns: Tensor | None) -> Iterator[None]:
        """Inside, the output head sees the hidden states of (row, column) pairs only: [1, N, C], not [B, T, C]."""
        if rows is None:
            yield
            return
        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, args: (args[0][rows, columns][None], *args[1:]))
        try:
            yield
        finally:
            handle.remove()

    @torch.inference_mode()
    def logits(self, tokens: Tensor, *, at: tuple[list[int], list[int]] | None = None, cache: Any = None,
               mask: Tensor | None = None) -> Tensor:  # fmt: skip
        """Logits [N, V] float32 after the tokens ``at`` = (rows, columns), or after each row's last column when None.

        tokens: [B, T]; cache: takes the tokens in; mask: of 0 and 1 where rows are padded: [B, past + T] on the left; [B, T] on
        the right only where ``stateful``.
        """
        keep: dict[str, Any] = {"logits_to_keep": 1} if at is None else {}
        if cache is not None:
            keep |= {self._cache_name: cache, "use_cache": True}
        elif not self.linearized:
            keep["use_cache"] = False
        if mask is not None:
            keep["attention_mask"] = mask
            if not self.linearized:
                keep["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        index = None if at is None else tuple(torch.tensor(i, device=tokens.device) for i in at)
        with self._only(*(index or (None, None))):
            out = self.model(input_ids=tokens, **keep, **self.switches).logits
        return out.flatten(0, 1).float()

    def prefill(self, tokens: Tensor, cache: Any, mask: Tensor | None = None) -> None:
        """Takes tokens [B, T] into the cache, with the logits of a single position."""
        self.logits(tokens, at=([0], [0]), cache=cache, mask=mask)
