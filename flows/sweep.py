"""The flow `sweep`: plan → base models scored first → convert, train, evaluate of each cell → table.

Deployments (prefect.yaml): sweep/ablation, sweep/scaling. In this process, without a server's worker: `golinear run`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.states import Cancelled, Completed, Failed, State

from flows import notify as notifications
from flows.cluster import Capacity, check_feasible, cluster
from flows.dead import bury
from flows.passes import check_pass
from flows.progress import Forgiving
from flows.reporting import publish_report, publish_table
from flows.runner import DONE, PRUNED, Outcome, Runner, run_stage
from sweeps import priorities, queries, services, study
from sweeps.cell import Placement, key_of
from sweeps.cost import Machine
from sweeps.flow_runs import FlowRun, alive
from sweeps.plan import Plan, make_plan
from sweeps.pruning import Divergence
from sweeps.request import HELP, build
from sweeps.store import Store
from sweeps.sweep import Sweep, pin
from sweeps.tracking import Tracker, prepare

Words = str | list[str]
STEERED = {"cancelled": "a person cancelled the sweep", "draining": "a person drained the sweep"}


@flow(
    name="sweep",
    description="Linearize base models in several ways, train, measure against the base, make a table.",
    on_completion=[notifications.on_end],
    on_failure=[notifications.on_end],
    on_crashed=[notifications.on_end],
    on_cancellation=[notifications.on_end],
)
def sweep(
    grid: str = "ablation",
    models: Words | None = None,
    mechanisms: Words | None = None,
    budgets: Words | None = None,
    adaptations: Words | None = None,
    merges: Words | None = None,
    softmax_layers: Words | None = None,
    recipes: Words | None = None,
    seeds: int | str | list[int | str] | None = None,
    tokens: int | float | str | None = None,
    sequence_length: int | str | None = None,
    batch_size: int | str | None = None,
    learning_rate: float | str | None = None,
    warmup_steps: int | str | None = None,
    objective: str | None = None,
    backbone: str | None = None,
    tasks: Words | None = None,
    limit: int | str | list[str] | None = None,
    lengths: int | str | list[int | str] | None = None,
    data: str | None = None,
    name: str | None = None,
    gpus: float | None = None,
    workers: int | None = None,
    checkpoint_minutes: float | None = None,
    max_gpu_hours: float | None = None,
    cells_per_pass: int = 1,
    fail_fast: bool = False,
    prune: float | None = None,
    priority: float | None = None,
    accept_base_scores: bool = False,
    notify: str = "",
) -> State:
    """Run a sweep. ``sweeps.request.HELP`` says what the parameters mean; None is the grid's default.

    gpus: of one cell; default one where there is one; 0.25: four cells share a card. workers: cells at work at a time;
    default as many as GPUs allow, without GPUs one a node. cells_per_pass: so many cells of a base model that differ in
    nothing but their recipe train over the same batches at a time, in one process; pays for objective layerwise and for
    small models on a GPU.
    checkpoint_minutes: between checkpoints; default 2, on a CPU a quarter of a minute. accept_base_scores: train although
    a full score of a base model is not the published one (it is refused otherwise). notify: the Prefect block that is
    told of the end (secret/NAME, webhook/NAME, slack-webhook/NAME).
    prune: end a cell whose loss is over so many times its best; above 1. priority: higher goes first; default 0.
    COMPLETED only if every cell is done (named Pruned when some were ended early as ``prune`` asks); CANCELLED when a
    person cancelled or drained the sweep; otherwise FAILED, naming the cells, while the others keep their scores.
    Raises ValueError, before anything starts, for whatever is not allowed.
    """
    given = {name: value for name, value in locals().items() if name in HELP}
    clock = Clock()
    say = get_run_logger().info
    notifications.check(notify)
    _outlive_the_worker()
    with ExitStack() as stack:
        spec = pin(build(grid, **given))
        if prune is not None:
            Divergence(prune)
        check_pass(cells_per_pass, gpus)
        store = Store()
        tracker = prepare(grid)
        bury(store, tracker, say)
        capacity = stack.enter_context(cluster()) if os.environ.get("RAY_ADDRESS") else None
        machine = _machine(capacity)
        per_cell = min(1, machine.num_gpus) if gpus is None else gpus
        minutes = checkpoint_minutes or (2.0 if per_cell else 0.25)
        placement = Placement(num_gpus=per_cell, source=spec.source, checkpoint_minutes=minutes)
        largest = max((g for g, _ in capacity.nodes), default=0) if capacity else machine.num_gpus
        check_feasible(placement.num_gpus, largest)
        plan = make_plan(
            spec, store, machine, placement, max_gpu_hours=max_gpu_hours, accept_base_scores=accept_base_scores
        )
        _show_plan(plan, say)
        clock.part("plan")
        if plan.refusal:
            raise ValueError(f"refused: {plan.refusal}")
        run = _prepare(plan, spec, store, tracker, workers or _places(machine, placement, capacity), fail_fast)
        run.prune, run.accept_base_scores, run.cells_per_pass = prune, accept_base_scores, cells_per_pass
        if priority is not None:
            priorities.put(store, run.sweep_id, priority)
        this = FlowRun(id=str(runtime.flow_run.id), sweep_id=run.sweep_id, tracking_run=run.parent)
        stack.enter_context(alive(store, this))
        try:
            if plan.counts["skip"] < len(plan.items):
                capacity = capacity or stack.enter_context(cluster())
                num_cpus = capacity.cpus_each(run.num_slots, placement.num_gpus)
                run.placement = dataclasses.replace(placement, num_cpus=num_cpus)
                clock.part("ray start")
                run.run(plan)
                clock.skip()
            table = _finish(plan, spec, store, run)
        except BaseException as error:
            queries.set_sweep_state(store, run.sweep_id, "failed")
            run.tracker.end(run.parent, "KILLED", f"{type(error).__name__}: {error}")
            raise
        bury(store, run.tracker, say)
    clock.part("table")
    for line in (table, f"time: {clock.report(run.seconds)}"):
        say("\n%s" if "\n" in line else "%s", line)
    return _state(plan, run)


def _outlive_the_worker() -> None:
    """A Prefect worker that dies closes the pipe that its flows log to, and rich would end a flow at its next line."""
    for handler in logging.getLogger().handlers:
        if console := getattr(handler, "console", None):
            console.on_broken_pipe = functools.partial(setattr, console, "quiet", True)


def _machine(capacity: Capacity | None) -> Machine:
    """This machine, with the GPUs of the cluster when there is one."""
    here = Machine.detect()
    return (
        here
        if capacity is None
        else dataclasses.replace(here, num_gpus=capacity.gpus, num_cpus=capacity.cpus, num_nodes=capacity.num_hosts)
    )


def _places(machine: Machine, placement: Placement, capacity: Capacity | None) -> int:
    """Cells at work at a time, unless told otherwise: as many as GPUs allow, without GPUs one a node."""
    if capacity is not None:
        return capacity.places(placement.num_gpus)
    return int(machine.num_gpus // placement.num_gpus) if placement.num_gpus else 1


def _prepare(plan: Plan, spec: Sweep, store: Store, tracker: Tracker, workers: int, fail_fast: bool) -> Runner:
    """What a run of this sweep needs; the sweep is remembered in the store and its parent run in MLflow is open."""
    keys = {"cells": [item.key for item in plan.items], "tasks": [task.canonical() for task in spec.tasks]}
    sweep_id = key_of(spec.name, keys)
    queries.save_sweep(store, sweep_id, spec)
    run = runtime.flow_run
    links = {"prefect.flow_run": str(run.ui_url or run.id), "prefect.flow_run_name": str(run.name)}
    parent = tracker.start_sweep(f"{spec.name} {run.name}", sweep_id, tags=links)
    tracker.show_sweep(parent, f"{spec.name} {run.name}", sweep_id, spec)
    tracker.log_text(parent, plan.to_json(), "plan.json")
    if page := services.urls().get("mlflow"):
        get_run_logger().info("MLflow: %s/#/experiments/%s/runs/%s", page, tracker.experiment_id, parent)
    num_slots = max(1, min(workers, len(plan.to_do)))
    return Runner(
        sweep=spec, sweep_id=sweep_id, store=store, tracker=Forgiving(tracker), parent=parent, machine=plan.machine,
        placement=plan.placement, num_slots=num_slots, say=get_run_logger().info, links=links, fail_fast=fail_fast,
    )  # fmt: skip


def _show_plan(plan: Plan, say: Any) -> None:
    """The plan as lines of the log and as a Prefect artifact."""
    rows = ["| cell | action | why | minutes |", "|---|---|---|---|"]
    for item in plan.items:
        minutes = f"{item.seconds / 60:.1f}" if item.action in ("run", "resume") else ""
        rows.append(f"| {item.cell.label} | {item.action} | {item.reason} | {minutes} |")
        say("%s: %s%s", item.cell.label, item.action, f" ({item.reason})" if item.reason else "")
    for task, source in zip(plan.sweep.tasks, plan.sweep.task_sources):
        rows.append(f"\n{task.label}: {source.reason or source.source}")
        if source.reason:
            say("%s is not measured here: %s", task.label, source.reason)
    create_markdown_artifact("\n".join(rows), key="plan", description=f"plan of {plan.sweep.name}")


def _finish(plan: Plan, spec: Sweep, store: Store, run: Runner) -> str:
    """Table and report, in Prefect and MLflow; returns the table as text, and where the report is."""
    found = study.of_sweep(store, spec, run.sweep_id)
    runs = queries.tracked_runs(store, [item.key for item in plan.items])
    text = publish_table(found, run.sweep_id, run.tracker, run.parent, runs)
    write = functools.partial(publish_report, found, run.sweep_id, run.tracker, run.parent)
    written = run_stage.with_options(name="report")("report", spec.name, write, return_state=True)
    undone, _ = _without_result(plan, run.outcomes)
    state = queries.sweep_state(store, run.sweep_id)
    if not undone or state == "running":
        queries.set_sweep_state(store, run.sweep_id, "failed" if undone else "completed")
    run.tracker.end(run.parent, "FINISHED" if not undone else "KILLED" if state in STEERED else "FAILED")
    # a report that could not be written costs no result: its task run says why
    return f"{text}\nreport: {written.result() if written.is_completed() else written.message}"


def _without_result(plan: Plan, outcomes: dict[str, Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Cells that are not done (failed, stopped, refused, claimed elsewhere, never reached), and those that were pruned."""
    names = {"pruned": PRUNED}
    planned = (Outcome(i.cell.label, names.get(i.action, "not run"), i.reason) for i in plan.items)
    absent = [outcomes.get(i.key, p) for i, p in zip(plan.items, planned) if i.action != "skip"]
    undone = [outcome for outcome in absent if outcome.state not in (DONE, PRUNED)]
    return undone, [outcome for outcome in absent if outcome.state == PRUNED]


def _state(plan: Plan, run: Runner) -> State:
    undone, pruned = _without_result(plan, run.outcomes)
    skipped = plan.counts["skip"]
    if undone:
        state = queries.sweep_state(run.store, run.sweep_id)
        end, how = (Cancelled, f"{STEERED[state]}; ") if state in STEERED else (Failed, "")
        return end(message=f"{how}{len(undone)} of {len(plan.items)} cells are not done: {_named(undone)}")
    finished = len(plan.items) - skipped - len(pruned)
    done = f"{finished} cells done" if finished else "nothing to do"
    done += f", {skipped} were done before" if skipped else ""
    if pruned:
        return Completed(name="Pruned", message=f"{done}; {len(pruned)} pruned as asked: {_named(pruned)}")
    return Completed(message=done)


def _named(outcomes: list[Outcome]) -> str:
    return "; ".join(f"{outcome.label} ({outcome.reason or outcome.state})" for outcome in outcomes)


class Clock:
    """Seconds by part of the flow, for the line at its end."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = defaultdict(float)
        self._at = self._start = time.monotonic()

    def part(self, name: str) -> None:
        """All since the last call was this part."""
        now = time.monotonic()
        self._parts[name] += now - self._at
        self._at = now

    def skip(self) -> None:
        """The time since the last call is told by others."""
        self._at = time.monotonic()

    def report(self, stages: dict[str, float]) -> str:
        parts = [f"{name} {seconds:.1f} s" for name, seconds in {**self._parts, **stages}.items()]
        return f"{', '.join(parts)}; all {time.monotonic() - self._start:.1f} s"
