"""One optimiser step as a function of tensors on the device: forward, backward, clip, update, for one or more cells.

``train_step`` takes what is on the device already and gives back what stays there: no value is read by the host, shapes
are those of the batch, so that it can be compiled or captured in a CUDA graph as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linear_core.convert import attention_modules
from linear_core.objectives import Objective, Sequences
from linear_core.optim import NewParameterOptimizer
from linear_core.ranks import ALONE, Ranks

NOWHERE = "the loss"  # is not finite, and nothing before it


class Stopped(Exception):
    """A step was given up between two micro-batches because the run is to stop. No parameter has changed."""


@dataclass(frozen=True)
class Trainee:
    """A linearized model and the optimiser of its new parameters."""

    model: Any
    optimizer: NewParameterOptimizer


def train_step(
    trainees: Sequence[Trainee],
    objective: Objective,
    batch: Sequences,
    micro_batch: int,
    should_stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> Tensor:
    """One update of each trainee, by the learning rate its optimiser holds.

    batch: all sequences of the step, or this rank's share of them; micro_batch: rows in one forward. Returns float32
    [trainees, 3]: loss, gradient norm before clipping, and 1 when the update was left out because something was not
    finite in this or an earlier step.
    Raises Stopped, with all gradients dropped, when ``should_stop`` says so between micro-batches.
    """
    losses = accumulate(trainees, objective, batch, micro_batch, should_stop)
    if ranks.size > 1:
        ranks.add([*losses, *(gradient for trainee in trainees for gradient in trainee.optimizer.gradients())])
    return torch.stack([trainee.optimizer.update(loss) for trainee, loss in zip(trainees, losses)])


def accumulate(
    trainees: Sequence[Trainee],
    objective: Objective,
    batch: Sequences,
    micro_batch: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Tensor]:
    """The step's gradients and each trainee's loss, micro-batch by micro-batch. No parameter changes."""
    models = [trainee.model for trainee in trainees]
    for trainee in trainees:
        trainee.optimizer.zero_grad()
    losses = [torch.zeros((), device=batch.input_ids.device) for _ in trainees]
    for part in batch.split(micro_batch):
        if should_stop():
            raise Stopped
        losses = [total + loss for total, loss in zip(losses, objective.backward(models, part))]
    return losses


def find_non_finite(trainee: Trainee, objective: Objective, batch: Sequences, micro_batch: int) -> str:
    """Where a step of a trainee goes wrong: the first layer whose attention output is not finite, else the parameter with
    a non-finite gradient that is furthest from the loss's start, i.e. in the last layer. Runs the step again without updating."""
    broken: list[str] = []

    def look(index: int) -> Callable[..., None]:
        def seen(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
            if not broken and not torch.isfinite(output[0]).all():
                broken.append(f"layer {index}: the attention output")

        return seen

    handles = [m.register_forward_hook(look(i)) for i, m in enumerate(attention_modules(trainee.model))]
    try:
        accumulate([trainee], objective, batch, micro_batch)
    finally:
        for handle in handles:
            handle.remove()
    bad = [
        name
        for name, p in trainee.optimizer.parameters.items()
        if not torch.isfinite(p).all() or (p.grad is not None and not torch.isfinite(p.grad).all())
    ]
    trainee.optimizer.zero_grad()
    return ", ".join([*broken, *bad[-1:]]) or NOWHERE
