"""How a training run can end. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NonFiniteError(FloatingPointError):
    """A loss or gradient was not finite; the update was not made.

    step: the step that failed, from 0. where: layer and parameter. last_checkpoint: the last good one, or None.
    """

    def __init__(self, step: int, where: str, last_checkpoint: Path | None) -> None:
        self.step, self.where, self.last_checkpoint = step, where, last_checkpoint
        super().__init__(
            f"loss or gradient is not finite at step {step} ({where}); nothing was updated; "
            f"last good checkpoint: {last_checkpoint or 'none'}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.where, self.last_checkpoint)


class Interrupted(RuntimeError):
    """The run was told to stop (SIGTERM or ``should_stop``). step: steps done; saved: the checkpoint they are in, or None."""

    def __init__(self, step: int, saved: Path | None) -> None:
        self.step, self.saved = step, saved
        super().__init__(
            f"training was told to stop after {step} steps; saved in {saved or 'nothing: no step was done'}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.step, self.saved)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended.

    seconds: over all its sittings; tokens_per_second and seconds_to_first_step: of the last one. loss: of the last step,
    None when there was nothing to train. micro_batch × accumulation: what it ended with; activation_checkpointing: the share of
    the layers whose activations were recomputed. peak_memory: bytes, allocated
    on the GPU or resident in the process, of the rank that took most. resumed_from: steps done before the last sitting,
    None for a fresh start. ranks: processes that trained together; sharded: whether the frozen weights were spread over
    them. micro_batch × accumulation × ranks is the batch size or a little more. cells: that trained in the same pass, whose
    time and memory these numbers are.
    """

    steps: int
    tokens_seen: int
    loss: float | None
    seconds: float
    tokens_per_second: float
    seconds_to_first_step: float
    micro_batch: int
    accumulation: int
    activation_checkpointing: float
    peak_memory: int
    resumed_from: int | None = None
    ranks: int = 1
    sharded: bool = False
    cells: int = 1
