"""What store, Prefect, Ray and MLflow cost a cell: a sweep of cells whose stages do nothing, through the real thing.

    golinear bench orchestration                       50 cells, on the Prefect server of golinear up or one of its own
    golinear bench orchestration --cells 200 --output overhead.json

Everything else is as in a sweep: claims, attempts, publishing, three Prefect tasks a cell, a Ray actor, an MLflow run with
curve, scores and files; from the command line in a home of its own, which is removed. Overhead is the wall time of a cell less
the time inside its stage functions, without the one start of the actor. Fails when the median is over 0.5 s or the 99th
percentile over 2 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from flows import workers
from flows.cluster import cluster
from flows.passes import Pass
from flows.progress import Forgiving
from flows.runner import DONE, Outcome, Runner
from flows.slots import Slot
from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.settings import TrainSettings
from sweeps import queries, stages
from sweeps.cell import Cell, Placement
from sweeps.cost import Machine
from sweeps.plan import Plan, PlanItem
from sweeps.provenance import provenance
from sweeps.request import build
from sweeps.store import Store
from sweeps.sweep import Sweep, TaskSource
from sweeps.tracking import prepare

MEDIAN, P99 = 0.5, 2.0  # seconds that a cell's overhead may take
TASK = TaskSpec(name="perplexity", limit=1)
TRAIN = TrainSettings(tokens=1024, sequence_length=64, batch_size=1, warmup_steps=1)


class Noop:
    """Stands in for sweeps.stages in the worker: no model, no training; the same files and values."""

    log_tail = staticmethod(stages.log_tail)
    adopt_checkpoints = staticmethod(stages.adopt_checkpoints)

    class Bench(stages.Bench):
        """A bench whose base model is always there."""

        def base_model(self, name: str, backbone: str = "") -> None:
            self.base = name

        def holds(self, cell: Cell) -> bool:
            return True

    def convert(self, cell: Cell, folder: Path, bench: Any) -> dict[str, Any]:
        stages.write_json(folder / "recipe.json", cell.recipe.to_dict())
        return {"new_parameters": 0, "seconds": 0.0}

    def train(self, cell: Cell, folder: Path, bench: Any, placement: Placement, *, on_progress: Any, **_: Any) -> Any:
        on_progress({"stage": "train", "done": 64, "total": 64, "unit": "tokens", "tokens_seen": 64, "loss": 1.0, "step": 0})
        (folder / stages.PARAMETERS).write_bytes(bytes(4096))
        found = provenance() | {"new_parameters": 1024, "train_seconds": 0.0, "training": {"loss": 1.0}}
        stages.write_json(folder / "provenance.json", found)
        return found

    def evaluate(
        self, cell: Cell, folder: Path, bench: Any, tasks: Iterable[TaskSpec], *, on_score: Any, **_: Any
    ) -> tuple[list[Score], dict[str, BaseException]]:
        found = [Score(task=task, metric="perplexity", value=1.0) for task in tasks]
        for score in found:
            on_score(score.task, [score])
        return found, {}


class NoopWorker(workers.Worker):
    """The worker of a sweep with stages that do nothing."""

    def __init__(self, store: Store, placement: Placement):
        super().__init__(store, placement)
        workers.stages = Noop()  # type: ignore[assignment]  # in this process, which serves nothing else
        self.bench = Noop.Bench()


class Timed(Runner):
    """A runner that keeps the wall time of every cell, actor starts left out, and the processor time of this process."""

    walls: list[float]
    cpus: list[float]

    def _cell(self, slot: Slot, item: PlanItem, together: Pass) -> Outcome | None:
        before, started, cpu = self.seconds["worker start"], time.perf_counter(), time.process_time()
        try:
            return super()._cell(slot, item, together)
        finally:
            self.cpus.append(time.process_time() - cpu)
            self.walls.append(time.perf_counter() - started - (self.seconds["worker start"] - before))


@flow(name="bench-orchestration")
def measure(cells: int) -> tuple[list[float], list[float]]:
    """Seconds of overhead of each cell: by the clock, and of this process's processor time, which does not count what others
    do to the machine. Raises RuntimeError when a cell was not done."""
    run = run_sweep(sweep_of(cells), NoopWorker)
    states = {outcome.state for outcome in run.outcomes.values()}
    if states != {DONE} or len(run.walls) != cells:
        raise RuntimeError(f"not every cell was done: {run.outcomes}")
    return run.walls, run.cpus


def sweep_of(cells: int, train: TrainSettings = TRAIN, base: str = "smollm2-135m") -> Sweep:
    """So many seeds of one recipe, pinned to weights and a text that nobody reads."""
    made = build("ablation", models=base, mechanisms="gdn", budgets="56+8", adaptations="none", seeds=list(range(1, cells + 1)))
    given = {"train": train.to_dict(), "revision": "none", "data": "none"}
    pinned = tuple(Cell.from_dict({**cell.to_dict(), **given}) for cell in made.cells if not cell.is_base)
    source = TaskSource(source="none", harness="none")
    return Sweep(name="orchestration", cells=pinned, tasks=(TASK,), task_sources=(source,))


def run_sweep(spec: Sweep, worker: type) -> Timed:
    """Run the cells, one at a time, with this worker. Call it within a flow."""
    store, tracker, machine = Store(), prepare("orchestration"), Machine.detect()
    keys = [(cell, spec.score_keys(cell)) for cell in spec.cells]
    items = tuple(PlanItem(cell=c, key=c.train_key, action="run", train=True, tasks=tasks) for c, tasks in keys)
    queries.save_sweep(store, spec.name, spec)
    with cluster():
        run = Timed(
            sweep=spec, sweep_id=spec.name, store=store, tracker=Forgiving(tracker), machine=machine,
            parent=tracker.start_sweep(spec.name, spec.name), placement=Placement(), num_slots=1,
            say=get_run_logger().debug, links={}, worker=worker,
        )  # fmt: skip
        run.walls, run.cpus = [], []
        run.run(Plan(sweep=spec, items=items, machine=machine, placement=Placement()))
    tracker.end(run.parent)
    return run


def summary(walls: Sequence[float], cpus: Sequence[float]) -> dict[str, Any]:
    """Median and 99th percentile (the largest below 100 cells), seconds."""
    return {
        "cells": len(walls), "median_s": statistics.median(walls), "p99_s": sorted(walls)[int(0.99 * len(walls))],
        "largest_s": max(walls), "median_cpu_s": statistics.median(cpus), "load": os.getloadavg()[0], "cpus": os.cpu_count(),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None, run: Callable[[int], Any] = measure) -> int:
    """Measure and show; 1 when it took too long."""
    from linear_core.bench.report import show

    parser = argparse.ArgumentParser(prog="golinear bench orchestration", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, default=50)
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args(argv)
    row = summary(*run(options.cells))
    show("orchestration of a cell", [row], device="cpu", output=options.output)
    return int(row["median_s"] > MEDIAN or row["p99_s"] > P99)
