"""The training loop behind ``linear_core.train``: steps, what they are read, checked and saved by, and what fits in memory."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from linear_core import checkpoint
from linear_core.convert import new_parameters, save_new_parameters
from linear_core.curve import Curve
from linear_core.data import TokenData
from linear_core.objectives import Objective, Sequences, make_objective
from linear_core.optim import NewParameterOptimizer, learning_rate
from linear_core.outcome import Interrupted, NonFiniteError, TrainResult
from linear_core.ranks import current, is_sharded
from linear_core.settings import TrainSettings, parse_objective
from linear_core.speed import FastStep, checkpoint_activations, compiled
from linear_core.step import NOWHERE, Stopped, Trainee, find_non_finite

logger = logging.getLogger(__name__)

TRAINER_VERSION = 1  # raised when the same settings would give other parameters
PARAMETERS = "new_parameters.safetensors"
SHARES = (0.25, 0.5, 1.0)  # of the layers whose activations are recomputed, one after another, when memory runs out
STEPS_IN_FLIGHT = {"cuda": 10}  # steps that run before the host reads their losses; elsewhere 1

Progress = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class Memory:
    """How a step is cut to fit, and the ladder down which it goes when memory runs out."""

    def __init__(
        self,
        models: Sequence[Any],
        micro_batch: int,
        recomputed: float = 0.0,
        may_shrink: bool = True,
        on_shrink: Callable[[], None] = lambda: None,
    ) -> None:
        self.models, self.micro_batch, self.may_shrink = models, micro_batch, may_shrink
        self.checkpoint_activations(recomputed)
        self.on_shrink = on_shrink  # frees what was built for the larger plan

    def fit(self, work: Callable[[int], T]) -> T:
        """``work(micro_batch)``, again with less after each torch.OutOfMemoryError, which is raised when nothing is left."""
        while True:
            try:
                return work(self.micro_batch)
            except torch.OutOfMemoryError:
                if not self._shrink():
                    raise
                self.on_shrink()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _shrink(self) -> bool:
        """Half the rows of a forward; at one row, recomputed activations in more and more layers. False when that is so in
        all already, and where ranks with sharded weights must make the same passes."""
        if not self.may_shrink:
            return False
        if self.micro_batch > 1:
            self.micro_batch = math.ceil(self.micro_batch / 2)
        elif more := [share for share in SHARES if share > self.recomputed]:
            self.checkpoint_activations(more[0])
        else:
            return False
        logger.warning(
            "out of memory: now %d rows a forward, activations of %.0f %% of the layers recomputed",
            self.micro_batch, 100 * self.recomputed,
        )  # fmt: skip
        return True

    def checkpoint_activations(self, share: float) -> None:
        """In this share of the layers of all models."""
        self.recomputed = float(share)
        for model in self.models:
            checkpoint_activations(model, share)


class Cell:
    """One cell of a run: its model, optimiser, folder and curve, and how it stands."""

    def __init__(self, index: int, model: Any, settings: TrainSettings, folder: Path, identity: dict[str, Any]) -> None:
        self.index, self.folder, self.curve = index, folder, Curve(folder)
        recipe = model.recipe
        self.identity = {**identity, "recipe": recipe.canonical()}
        optimizer = NewParameterOptimizer(
            new_parameters(model), settings, settings.peak_learning_rate(recipe.adaptation)
        )
        self.trainee = Trainee(model, optimizer)
        self.loss: float | None = None
        self.error: NonFiniteError | None = None

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Go back to a checkpoint of this cell."""
        tensors = found.tensors()
        self.trainee.optimizer.restore(tensors)
        checkpoint.restore_random_states(tensors)
        self.loss = found.state["loss"]


class Run:
    """Several cells on the same batches, step by step. Made for one call of ``run``."""

    def __init__(
        self,
        models: Sequence[Any],
        settings: TrainSettings,
        data: TokenData,
        folders: Sequence[Path],
        seed: int,
        *,
        micro_batch: int,
        recomputed: float,
        checkpoint_seconds: float,
        on_progress: Progress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.settings, self.data, self.seed = settings, data, seed
        self.checkpoint_seconds, self.on_progress, self.should_stop = checkpoint_seconds, on_progress, should_stop
        self.ranks = current()
        self.sharded = is_sharded(models[0])
        self.fast_step = FastStep(self.ranks)
        self.memory = Memory(
            models, micro_batch, recomputed, may_shrink=not self.sharded, on_shrink=self.fast_step.reset
        )
        self.device = next(models[0].parameters()).device
        identity = {
            "settings": settings.canonical(),
            "data": data.fingerprint,
            "seed": seed,
            "trainer": TRAINER_VERSION,
        }
        self.cells = [Cell(i, m, settings, f, identity) for i, (m, f) in enumerate(zip(models, folders))]
        self.step = 0  # steps done
        self.resumed_from: int | None = None
        self.seconds_before = self.seconds_to_first_step = 0.0
        self._window: list[tuple[int, list[Cell], Tensor]] = []  # steps whose numbers the host has not read
        self._started = self._window_started = self._saved_at = time.monotonic()

    @property
    def active(self) -> list[Cell]:
        """Cells that have not failed."""
        return [cell for cell in self.cells if cell.error is None]

    def run(self) -> list[TrainResult | NonFiniteError]:
        """Train to the end. Raises as ``linear_core.train.train`` does, but hands NonFiniteError back in its cell's place."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._resume()
        with compiled([cell.trainee.model for cell in self.cells]):
            self._all_steps()
        self._save()
        self.ranks.on_first(self._save_results)
        return [cell.error or self._result(cell) for cell in self.cells]

    def _save_results(self) -> None:
        for cell in self.active:
            save_new_parameters(cell.trainee.model, cell.folder / PARAMETERS)

    def _all_steps(self) -> None:
        for name, first, end in self._phases():
            if self.step < end and self.active:
                objective = make_objective(name)
                models = [cell.trainee.model for cell in self.active]
                self.memory.fit(lambda rows: objective.prepare(models, self._whole_batch(first), rows))  # noqa: B023
                while self.step < end and self.active:
                    self._one_step(objective)
                self._read(objective)

    def tokens_seen(self, steps: int) -> int:
        """Tokens of the first ``steps`` steps; whole sequences, so never fewer than asked for at the end."""
        length = self.settings.sequence_length
        return min(steps * self.settings.batch_size, math.ceil(self.settings.tokens / length)) * length

    def _phases(self) -> list[tuple[str, int, int]]:
        """(objective, first step, end) of a chain. A step belongs to the objective that its first token falls to."""
        phases, tokens, first = [], 0, 0
        for name, count in parse_objective(self.settings.objective, self.settings.tokens):
            tokens += count
            end = math.ceil(tokens / (self.settings.batch_size * self.settings.sequence_length))
            phases.append((name, first, end))
            first = end
        return phases

    def _batch(self, step: int) -> Sequences:
        """This rank's share of a step."""
        return self._whole_batch(step).share(self.ranks)

    def _whole_batch(self, step: int) -> Sequences:
        return Sequences.of(self.data.batch(step, self.settings, self.seed), self.device)

    def _one_step(self, objective: Objective) -> None:
        if self.ranks.size > 1 and self.ranks.any(self.should_stop()):
            self._interrupt(objective)
        should_stop = self.should_stop if self.ranks.size == 1 else lambda: False
        cells, batch = self.active, self._batch(self.step)
        for cell in cells:
            cell.trainee.optimizer.set_rate(self.step)
        trainees = [cell.trainee for cell in cells]
        try:
            numbers = self.memory.fit(lambda rows: self.fast_step(trainees, objective, batch, rows, should_stop))
        except Stopped:
            self._interrupt(objective)
        self._window.append((self.step, cells, numbers))
        self.step += 1
        if not self.seconds_to_first_step:
            numbers.cpu()
            self.seconds_to_first_step = time.monotonic() - self._started
        if len(self._window) >= STEPS_IN_FLIGHT.get(self.device.type, 1):
            self._read(objective)
        if self.ranks.any(self.ranks.leads and time.monotonic() - self._saved_at >= self.checkpoint_seconds):
            self._read(objective)
            self._save()

    def _read(self, objective: Objective) -> None:
        """Read the numbers of the steps in flight, write the curve, and take out cells whose step was not finite."""
        if not self._window:
            return
        read = [(step, cells, numbers.tolist()) for step, cells, numbers in self._window]
        self._window = []
        now = time.monotonic()
        tokens = self.tokens_seen(self.step) - self.tokens_seen(read[0][0])
        rate, self._window_started = tokens / max(now - self._window_started, 1e-9), now
        for step, cells, numbers in read:
            for cell, (loss, norm, failed) in zip(cells, numbers):
                if failed and cell.error is None:
                    cell.error = self._error(cell, step, objective)
                elif not failed:
                    cell.loss = loss
                    if self.ranks.leads:
                        self._report(cell, step, loss, norm, rate)

    def _error(self, cell: Cell, step: int, objective: Objective) -> NonFiniteError:
        """Where it went wrong, from the first rank that finds the place."""

        def look() -> str:
            return find_non_finite(cell.trainee, objective, self._batch(step), self.memory.micro_batch)

        places = self.ranks.gather(look)
        good = self.ranks.on_first(lambda: checkpoint.complete(cell.folder)[-1:])
        where = next((place for place in places if place != NOWHERE), NOWHERE)
        return NonFiniteError(step, where, good[0].path if good else None)

    def _report(self, cell: Cell, step: int, loss: float, norm: float, tokens_per_second: float) -> None:
        row = {
            "step": step,
            "tokens_seen": self.tokens_seen(step + 1),
            "loss": loss,
            "learning_rate": learning_rate(step, self.settings, cell.trainee.optimizer.peak),
            "grad_norm": norm,
            "tokens_per_second": tokens_per_second,
        }
        cell.curve.append([row])
        progress = {"stage": "train", "done": row["tokens_seen"], "total": self.settings.tokens, "unit": "tokens"}
        self.on_progress({**progress, "cell": cell.index, **row})

    def _resume(self) -> None:
        """Go on from the last step that every cell has a complete checkpoint of. Rank 0 reads it, the others follow."""
        self.step, self.resumed_from, self.seconds_before = self.ranks.on_first(self._restore)
        if self.resumed_from is not None:
            logger.info("going on from step %d of %d", self.step, self.settings.num_steps)
        for cell in self.cells:
            self.ranks.spread(cell.trainee.optimizer.tensors().values())

    def _restore(self) -> tuple[int, int | None, float]:
        """Reads checkpoints back. Returns steps done, the same or None when there was none, and seconds before."""
        for cell in self.cells:
            cell.folder.mkdir(parents=True, exist_ok=True)
        found = [{c.step: c for c in checkpoint.complete(cell.folder)} for cell in self.cells]
        for cell, checkpoints in zip(self.cells, found):
            for one in checkpoints.values():
                checkpoint.check_identity(one, cell.identity)
        common = set.intersection(*(set(checkpoints) for checkpoints in found))
        step = max(common, default=0)
        for cell, checkpoints in zip(self.cells, found):
            if common:
                cell.restore(checkpoints[step])
            cell.curve.keep(step)
        return (step, step, found[0][step].state["seconds"]) if common else (0, None, 0.0)

    def _save(self) -> Path | None:
        """A checkpoint of every active cell, whose numbers have all been read. Returns the path of the first, if any."""
        paths = self.ranks.on_first(lambda: [self._save_cell(cell) for cell in self.active])
        self._saved_at = time.monotonic()
        return paths[0] if paths else None

    def _save_cell(self, cell: Cell) -> Path:
        state = {
            "identity": cell.identity,
            "tokens_seen": self.tokens_seen(self.step),
            "seconds": self.seconds_before + time.monotonic() - self._started,
            "loss": cell.loss,
        }
        return checkpoint.save(cell.folder, self.step, cell.trainee.optimizer.tensors(), state)

    def _interrupt(self, objective: Objective) -> NoReturn:
        self._read(objective)
        raise Interrupted(self.step, self._save() if self.step else None)

    def _result(self, cell: Cell) -> TrainResult:
        sitting = time.monotonic() - self._started
        seen = self.tokens_seen(self.step)
        on_gpu = self.device.type == "cuda"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return TrainResult(
            steps=self.step,
            tokens_seen=seen,
            loss=cell.loss,
            seconds=self.seconds_before + sitting,
            tokens_per_second=(seen - self.tokens_seen(self.resumed_from or 0)) / sitting,
            seconds_to_first_step=self.seconds_to_first_step,
            micro_batch=self.memory.micro_batch,
            accumulation=math.ceil(self.settings.batch_size / self.ranks.size / self.memory.micro_batch),
            activation_checkpointing=self.memory.recomputed,
            peak_memory=max(
                self.ranks.gather(lambda: torch.cuda.max_memory_allocated(self.device) if on_gpu else resident)
            ),
            resumed_from=self.resumed_from,
            ranks=self.ranks.size,
            sharded=self.sharded,
        )
