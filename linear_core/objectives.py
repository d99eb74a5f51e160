"""What a training step minimises: ``ce`` next-token cross-entropy, ``kl`` to the frozen base, ``layerwise`` (recipe section 7).

An objective takes some sequences and one or more linearized models that share a base, adds to the gradients of their
new parameters and returns each model's share of the loss. All are normalised by counts of the whole step, so that
splitting a step into micro-batches changes nothing but rounding.

Shape letters: B rows, T tokens, N = B·T, C hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from linear_core.convert import base_attention
from linear_core.data import IGNORE, Batch
from linear_core.ranks import Ranks
from linear_core.streams import side_by_side

TOKENS_AT_ONCE = 1024  # rows of logits in memory at a time


@dataclass(frozen=True)
class Sequences:
    """Rows of a step on the device. input_ids, labels: [B, T]; document_ids: [B, T] or None (linear_core.data.Batch).
    num_targets, num_tokens: of the whole step, which a loss is normalised by."""

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor | None
    num_targets: int
    num_tokens: int

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Sequences:
        """A step's batch on a device."""
        input_ids, labels = (torch.from_numpy(a).to(device) for a in (batch.input_ids, batch.labels))
        document_ids = None if batch.document_ids is None else torch.from_numpy(batch.document_ids).to(device)
        return cls(input_ids, labels, document_ids, batch.num_targets, batch.input_ids.size)

    def share(self, ranks: Ranks) -> Sequences:
        """A rank's rows; the counts stay the whole step's."""
        rows = ranks.rows
        ids = None if self.document_ids is None else self.document_ids[rows]
        return replace(self, input_ids=self.input_ids[rows], labels=self.labels[rows], document_ids=ids)

    def split(self, rows: int) -> Iterator[Sequences]:
        """Micro-batches of at most ``rows`` rows; the counts stay the whole step's."""
        for i in range(0, len(self.input_ids), rows):
            ids = None if self.document_ids is None else self.document_ids[i : i + rows]
            yield Sequences(
                self.input_ids[i : i + rows], self.labels[i : i + rows], ids, self.num_targets, self.num_tokens
            )


class Objective(Protocol):
    def prepare(self, models: Sequence[Any], first: Sequences, micro_batch: int) -> None:
        """Called once before the objective's first step, with that step's batch; again when a run is resumed."""

    def backward(self, models: Sequence[Any], part: Sequences) -> list[Tensor]:
        """Forward and backward of one micro-batch. Returns each model's share of the step's loss, [] detached."""


class CrossEntropy:
    """Mean next-token cross-entropy, in nats."""

    def prepare(self, models: Sequence[Any], first: Sequences, micro_batch: int) -> None:
        """Nothing to prepare."""

    def backward(self, models: Sequence[Any], part: Sequences) -> list[Tensor]:
        def learn(model: Any) -> Tensor:
            hidden = last_hidden(model, part.input_ids, part.document_ids)
            loss = cross_entropy_sum(hidden, model.lm_head.weight, part.labels) / part.num_targets
            loss.backward()
            return loss.detach()

        return side_by_side([partial(learn, model) for model in models], part.input_ids.device)


class KullbackLeibler:
    """Mean KL(base ‖ model) of the next-token distributions, in nats. The base is the model itself under the base's attention."""

    def prepare(self, models: Sequence[Any], first: Sequences, micro_batch: int) -> None:
        """Nothing to prepare."""

    def backward(self, models: Sequence[Any], part: Sequences) -> list[Tensor]:
        with torch.no_grad(), base_attention(models[0]):
            target = last_hidden(models[0], part.input_ids, part.document_ids, paths="base")

        def learn(model: Any) -> Tensor:
            hidden = last_hidden(model, part.input_ids, part.document_ids)
            loss = kl_sum(hidden, target, model.lm_head.weight, part.labels != IGNORE) / part.num_targets
            loss.backward()
            return loss.detach()

        return side_by_side([partial(learn, model) for model in models], part.input_ids.device)


def make_objective(name: str) -> Objective:
    """``ce``, ``kl`` or ``layerwise`` → the objective. Raises KeyError: settings have checked the name."""
    from linear_core.layerwise import Layerwise

    kinds: dict[str, type[Objective]] = {"ce": CrossEntropy, "kl": KullbackLeibler, "layerwise": Layerwise}
    return kinds[name]()


def last_hidden(model: Any, input_ids: Tensor | None, document_ids: Tensor | None = None, **arguments: Any) -> Tensor:
    """What the model's head reads, [B, T, C] after the final norm; no [N, V] logits are made. arguments: the model's."""
    found: list[Tensor] = []
    if document_ids is not None:
        arguments["document_ids"] = document_ids
    handle = model.model.norm.register_forward_hook(lambda _module, _inputs, output: found.append(output))
    try:
        model(input_ids=input_ids, use_cache=False, logits_to_keep=1, **arguments)
    finally:
        handle.remove()
    return found[0]


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ −log p(label) over labels that are not IGNORE, float32 []. hidden: [B, T, C], weight: [V, C], labels: [B, T].

    The weight is frozen and gets no gradient.
    """
    return FrozenCrossEntropy.apply(hidden.flatten(0, 1), weight, labels.flatten())


class FrozenCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy in one, TOKENS_AT_ONCE rows of logits in memory at a time.

    The gradient by the rows is made beside the loss: two matrix products in all. The kernel libraries' fused form also
    makes the weight's gradient in float32, frozen or not: 90 of 498 ms of an 8B step on an H200 (results/first-runs-h200.md).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """hidden: [N, C], weight: [V, C], labels: [N] → Σ −log p over labels that are not IGNORE, float32 []."""
        total = torch.zeros((), device=hidden.device)
        gradients = []
        on_rows = _compiled_loss_and_gradient() if hidden.is_cuda else loss_and_gradient
        for rows, wanted in zip(hidden.split(TOKENS_AT_ONCE), labels.split(TOKENS_AT_ONCE)):
            loss, by_logits = on_rows(functional.linear(rows, weight), wanted, ctx.needs_input_grad[0])
            total = total + loss
            if by_logits is not None:
                gradients.append(by_logits @ weight)
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """The rows' gradient, kept from the forward pass, times the upstream one."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].to(gradient.dtype), None, None


def loss_and_gradient(logits: Tensor, labels: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """(Σ −log p over labels that are not IGNORE, float32 []; its gradient by the logits in their type, if asked for).
    logits: [N, V], labels: [N]."""
    counted = (labels != IGNORE).unsqueeze(1)
    index = labels.clamp_min(0).unsqueeze(1)
    wide = logits.float()
    log_total = wide.logsumexp(1, keepdim=True)
    loss = ((log_total - wide.gather(1, index)) * counted).sum()
    if not with_gradient:
        return loss, None
    hit = torch.arange(logits.shape[1], device=logits.device) == index
    return loss, (wide.sub_(log_total).exp_().sub_(hit.float()) * counted).to(logits.dtype)


@cache
def _compiled_loss_and_gradient() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """On a GPU two passes over the logits in place of nine."""
    return torch.compile(loss_and_gradient, dynamic=False)


def kl_sum(hidden: Tensor, target: Tensor, weight: Tensor, counted: Tensor) -> Tensor:
    """Σ KL(softmax(target·weightᵀ) ‖ softmax(hidden·weightᵀ)) over counted tokens, float32 [].

    hidden, target: [B, T, C] (target without gradient), weight: [V, C], counted: bool [B, T].
    """

    def of_chunk(h: Tensor, t: Tensor, some: Tensor) -> Tensor:
        ours, base = (functional.linear(x, weight).float().log_softmax(-1) for x in (h, t))
        return ((base.exp() * (base - ours)).sum(-1) * some).sum()

    return _sum_of_chunks(of_chunk, hidden.flatten(0, 1), target.flatten(0, 1), counted.flatten())


def _sum_of_chunks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Σ function(rows) over chunks of TOKENS_AT_ONCE rows; with several, each is computed again for its gradient."""
    if len(tensors[0]) <= TOKENS_AT_ONCE:
        return function(*tensors)
    total = torch.zeros((), device=tensors[0].device)
    for chunk in zip(*(t.split(TOKENS_AT_ONCE) for t in tensors)):
        total = total + checkpoint(function, *chunk, use_reentrant=False)
    return total
