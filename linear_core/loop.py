"""The training loop behind ``linear_core.train``: steps, what they are read, checked and saved by, and what fits in memory."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
    """One cell of a run: its model, optimiser, folder and curve, and how it stands.

    start: the step that its newest checkpoint goes on from. Cells that have come further wait there for the others.
    """

    def __init__(self, index: int, model: Any, settings: TrainSettings, folder: Path, identity: dict[str, Any]) -> None:
        self.index, self.folder, self.curve = index, folder, Curve(folder)
        recipe = model.recipe
        self.identity = {**identity, "recipe": recipe.canonical()}
        optimizer = NewParameterOptimizer(
            new_parameters(model), settings, settings.peak_learning_rate(recipe.adaptation)
        )
        self.trainee = Trainee(model, optimizer)
        self.loss: float | None = None
        self.error: NonFiniteError | Interrupted | None = None
        self.start = 0
        self.resumed_from: int | None = None
        self.seconds_before = 0.0
        self.saved: Path | None = None  # the newest checkpoint

    def restore(self) -> tuple[int, int | None, float]:
        """Go back to the newest complete checkpoint. Returns steps done, the same or None without one, and seconds before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        complete = checkpoint.complete(self.folder)
        for one in complete:
            checkpoint.check_identity(one, self.identity)
        if not complete:
            self.curve.keep(0)
            return 0, None, 0.0
        newest = complete[-1]
        tensors = newest.tensors()
        self.trainee.optimizer.restore(tensors)
        checkpoint.restore_random_states(tensors)
        self.loss, self.saved = newest.state["loss"], newest.path
        self.curve.keep(newest.step)
        return newest.step, newest.step, newest.state["seconds"]


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
        leaves: Callable[[int], bool] | None,
    ) -> None:
        self.leaves = leaves
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
        self.seconds_to_first_step = 0.0
        self._window: list[tuple[int, list[Cell], Tensor]] = []  # steps whose numbers the host has not read
        self._started = self._window_started = self._saved_at = time.monotonic()

    @property
    def left(self) -> list[Cell]:
        """Cells that have neither failed nor been stopped."""
        return [cell for cell in self.cells if cell.error is None]

    @property
    def active(self) -> list[Cell]:
        """Those of them that are to make this step."""
        return [cell for cell in self.left if cell.start <= self.step]

    def run(self) -> list[TrainResult | NonFiniteError | Interrupted]:
        """Train to the end. Raises as ``linear_core.train.train_cells`` does."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._resume()
        with compiled([cell.trainee.model for cell in self.cells]):
            self._all_steps()
        self._save()
        self.ranks.on_first(self._save_results)
        return [cell.error or self._result(cell) for cell in self.cells]

    def _save_results(self) -> None:
        for cell in self.left:
            save_new_parameters(cell.trainee.model, cell.folder / PARAMETERS)

    def _all_steps(self) -> None:
        for name, first, end in self._phases():
            if self.step < end and self.left:
                objective = make_objective(name)
                models = [cell.trainee.model for cell in self.left]
                self.memory.fit(lambda rows: objective.prepare(models, self._whole_batch(first), rows))  # noqa: B023
                while self.step < end and self.left:
                    if self.active:
                        self._one_step(objective)
                    else:  # those that were behind are out
                        self.step = min(cell.start for cell in self.left)
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
            self._interrupt(self.left, objective)
        if self.leaves:
            leaves = self.leaves
            self._interrupt([cell for cell in self.left if self.ranks.any(leaves(cell.index))], objective)
        if not self.active:
            return
        should_stop = self.should_stop if self.ranks.size == 1 else lambda: False
        cells, batch = self.active, self._batch(self.step)
        for cell in cells:
            cell.trainee.optimizer.set_rate(self.step)
        trainees = [cell.trainee for cell in cells]
        try:
            numbers = self.memory.fit(lambda rows: self.fast_step(trainees, objective, batch, rows, should_stop))
        except Stopped:
            self._interrupt(self.left, objective)
            return
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
        """Each cell goes on from its own newest checkpoint, the run from the oldest of these. Rank 0 reads, the others follow."""
        found = self.ranks.on_first(lambda: [cell.restore() for cell in self.cells])
        for cell, restored in zip(self.cells, found):
            cell.start, cell.resumed_from, cell.seconds_before = restored
            self.ranks.spread(cell.trainee.optimizer.tensors().values())
            if cell.resumed_from is not None:
                logger.info("%s goes on from step %d of %d", cell.folder, cell.start, self.settings.num_steps)
        self.step = min(cell.start for cell in self.cells)

    def _save(self) -> None:
        """A checkpoint of every active cell, whose numbers have all been read."""
        self._save_cells(self.active)
        self._saved_at = time.monotonic()

    def _save_cells(self, cells: Sequence[Cell]) -> None:
        paths = self.ranks.on_first(lambda: [self._save_cell(cell) for cell in cells])
        for cell, path in zip(cells, paths):
            cell.saved = path

    def _save_cell(self, cell: Cell) -> Path:
        state = {
            "identity": cell.identity,
            "tokens_seen": self.tokens_seen(self.step),
            "seconds": cell.seconds_before + time.monotonic() - self._started,
            "loss": cell.loss,
        }
        return checkpoint.save(cell.folder, self.step, cell.trainee.optimizer.tensors(), state)

    def _interrupt(self, cells: Sequence[Cell], objective: Objective) -> None:
        """Take cells out that are told to stop, saved."""
        if cells:
            self._read(objective)
            out = [cell for cell in cells if cell.error is None]  # the last steps may have failed
            self._save_cells([cell for cell in out if 0 < self.step >= cell.start])
            for cell in out:
                cell.error = Interrupted(max(self.step, cell.start), cell.saved)

    def _result(self, cell: Cell) -> TrainResult:
        sitting = time.monotonic() - self._started
        seen = self.tokens_seen(self.step)
        on_gpu = self.device.type == "cuda"
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return TrainResult(
            steps=self.step,
            tokens_seen=seen,
            loss=cell.loss,
            seconds=cell.seconds_before + sitting,
            tokens_per_second=(seen - self.tokens_seen(cell.start)) / sitting,
            seconds_to_first_step=self.seconds_to_first_step,
            micro_batch=self.memory.micro_batch,
            accumulation=math.ceil(self.settings.batch_size / self.ranks.size / self.memory.micro_batch),
            activation_checkpointing=self.memory.recomputed,
            peak_memory=max(
                self.ranks.gather(lambda: torch.cuda.max_memory_allocated(self.device) if on_gpu else resident)
            ),
            resumed_from=cell.resumed_from,
            cells=len(self.cells),
            ranks=self.ranks.size,
            sharded=self.sharded,
        )
