"""Attention-output matching: every layer of every cell learns on the base's own inputs, with no backward through the backbone.

One forward of the frozen base passes each layer's input h to that layer of each model, whose output y is compared with
the base's: loss of a layer = mean over tokens and channels of (y_base − y)² / Var(y_base). The gradient of a layer ends
at its own new parameters and is taken at once, so that one layer's activations are in memory at a time. The variance
is that of the objective's first batch, so that the loss does not depend on how a step is split.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from linear_core.adaptation import set_lora
from linear_core.attention import LinearizedAttention, Projected
from linear_core.convert import attention_modules, base_attention
from linear_core.objectives import Sequences
from linear_core.streams import side_by_side

Visit = Callable[[int, Tensor, dict[str, Any], Tensor], None]  # layer, h [B, T, C], its arguments, y_base [B, T, C]


class Layerwise:
    """Mean over the linearized layers of a layer's error as a share of its output's variance."""

    def __init__(self) -> None:
        self._variance: list[Tensor] = []  # of each layer's output, float32 []

    def prepare(self, models: Sequence[Any], first: Sequences, micro_batch: int) -> None:
        """Measure the variance of each layer's output over the first batch."""
        moments = [
            torch.zeros(3, device=first.input_ids.device, dtype=torch.float64) for _ in attention_modules(models[0])
        ]

        def measure(index: int, _h: Tensor, _arguments: dict[str, Any], y: Tensor) -> None:
            y = y.double()
            moments[index] += torch.stack(
                [torch.tensor(float(y.numel()), device=y.device).double(), y.sum(), y.square().sum()]
            )

        for part in first.split(micro_batch):
            _visit_layers(models[0], part, measure)
        self._variance = [(m[2] / m[0] - (m[1] / m[0]) ** 2).clamp_min(1e-30).float() for m in moments]

    def backward(self, models: Sequence[Any], part: Sequences) -> list[Tensor]:
        """One base forward; each model's layers add their gradients on the way."""
        layers = [[isinstance(m, LinearizedAttention) for m in attention_modules(model)] for model in models]
        losses = [torch.zeros((), device=part.input_ids.device) for _ in models]

        def match(index: int, h: Tensor, arguments: dict[str, Any], y: Tensor) -> None:
            matched = {i: attention_modules(model)[index] for i, model in enumerate(models) if layers[i][index]}
            own = {i for i, attention in matched.items() if attention.recipe.adaptation == "lora"}
            # q, k, v of the frozen projections are the same for all cells without LoRA
            first = next((attention for i, attention in matched.items() if i not in own), None)
            shared = None if first is None else first.project(h, arguments["position_embeddings"])
            weight = self._variance[index] * part.num_tokens * y.shape[-1]

            def learn(i: int, attention: LinearizedAttention) -> None:
                set_lora(attention, True)
                with torch.enable_grad():
                    loss = on_device(attention, h, y, arguments, None if i in own else shared) / weight
                    loss.backward()
                losses[i] += loss.detach() / sum(layers[i])

            on_device = _compiled_squared_error() if h.is_cuda else squared_error
            side_by_side([partial(learn, i, attention) for i, attention in matched.items()], h.device)

        _visit_layers(models[0], part, match)
        return losses


def squared_error(
    attention: LinearizedAttention, h: Tensor, y: Tensor, arguments: dict[str, Any], projected: Projected | None
) -> Tensor:
    """Σ (y − the layer's output)², float32 []. h, y: [B, T, C]; arguments and projected: as in its ``forward``."""
    ours = attention.forward(h, **arguments, projected=projected)[0]
    return (y.float() - ours.float()).square().sum()


@cache
def _compiled_squared_error() -> Callable[..., Tensor]:
    """Elementwise work fused, as ``linear_core.speed.compiled`` does it for whole layers; compiled once per recipe."""
    return torch.compile(squared_error, dynamic=False)


def _visit_layers(model: Any, part: Sequences, visit: Visit) -> None:
    """Run the frozen base over the sequences and show every attention layer's input and output."""

    def hook(index: int) -> Callable[..., None]:
        def seen(_module: Any, inputs: tuple[Any, ...], arguments: dict[str, Any], output: tuple[Tensor, Any]) -> None:
            if arguments["layout"].paths == "base":  # not our own call of the same module
                h = inputs[0] if inputs else arguments["hidden_states"]
                layout = dataclasses.replace(arguments["layout"], paths="hybrid")
                visit(index, h, {"position_embeddings": arguments["position_embeddings"], "layout": layout}, output[0])

        return torch.compiler.disable(seen)  # the layer around it may be compiled, a backward pass in it cannot be

    modules = attention_modules(model)
    handles = [module.register_forward_hook(hook(i), with_kwargs=True) for i, module in enumerate(modules)]
    arguments = {} if part.document_ids is None else {"document_ids": part.document_ids}
    try:
        with torch.no_grad(), base_attention(model):
            model(input_ids=part.input_ids, use_cache=False, logits_to_keep=1, paths="base", **arguments)
    finally:
        for handle in handles:
            handle.remove()


def twins(model: Any, number: int) -> list[Any]:
    """``number`` further models over the same weight tensors, for several cells of one base in one process.

    model: not converted. Each twin can be converted by its own recipe; the memory of a twin is its new parameters'.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return [copy.deepcopy(model, dict(shared)) for _ in range(number)]
