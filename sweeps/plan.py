"""What a sweep would do, cell by cell, before anything starts or costs. Imports no torch; one query to the store.

Actions: ``run``, ``skip`` (done), ``resume`` (from a checkpoint), ``wait`` (claimed by someone else), ``refuse``, and
``pruned`` (ended early because it diverged; not tried again without ``golinear retry``).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.models import BaseModel, Shape, check_backbone, resolve
from sweeps import cost, preflight, queries, retries
from sweeps.cell import Cell, Placement
from sweeps.cost import GIB, Machine
from sweeps.home import tracking_uri
from sweeps.store import Claim, Store
from sweeps.sweep import Sweep, applies, pin
from sweeps.weights import why_not_at_hand

ACTIONS = ("run", "resume", "skip", "wait", "refuse", "pruned")


@dataclass(frozen=True, kw_only=True)
class PlanItem:
    """One cell with what will happen to it. ``tasks`` are those still to be measured, with the keys of their scores."""

    cell: Cell
    key: str
    action: str
    reason: str = ""
    train: bool = False  # False: published, only scores are missing
    tasks: tuple[tuple[TaskSpec, str], ...] = ()
    resume_tokens: int = 0
    seconds: float = 0.0
    memory: float = 0.0  # bytes

    def as_claimed(self, claim: Claim) -> PlanItem | None:
        """What is still to do now that the cell is claimed: another sweep may have done it since the plan. None: nothing."""
        train = self.train and not claim.published
        tasks = tuple((task, key) for task, key in self.tasks if key not in claim.scored)
        return replace(self, train=train, tasks=tasks) if train or tasks else None

    def to_dict(self) -> dict[str, Any]:
        recipe = self.cell.recipe
        return {
            "key": self.key, "action": self.action, "reason": self.reason, "label": self.cell.label,
            "base": self.cell.base, "is_base": self.cell.is_base, "mechanism": recipe.mechanism,
            "budget": None if self.cell.is_base else recipe.budget, "adaptation": recipe.adaptation,
            "seed": self.cell.seed, "train": self.train, "tasks": [task.label for task, _ in self.tasks],
            "resume_tokens": self.resume_tokens, "seconds": round(self.seconds, 1),
            "memory_gib": round(self.memory / GIB, 2),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cells of a pinned sweep. ``refusal`` says why the whole plan must not start; "" when it may."""

    sweep: Sweep
    items: tuple[PlanItem, ...]
    machine: Machine
    placement: Placement
    refusal: str = ""

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(item.action for item in self.items)
        return {action: found[action] for action in ACTIONS if found[action] or action != "pruned"}

    @property
    def to_do(self) -> tuple[PlanItem, ...]:
        return tuple(item for item in self.items if item.action in ("run", "resume"))

    @property
    def seconds(self) -> float:
        """Device time of all that is to do, one device each, start-up of each base model's process included."""
        groups = {item.cell.base for item in self.to_do}
        return sum(item.seconds for item in self.to_do) + cost.START_SECONDS * len(groups)

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.placement.num_gpus / 3600

    @property
    def cost(self) -> float | None:
        return None if self.machine.price is None else self.gpu_hours * self.machine.price

    def to_dict(self) -> dict[str, Any]:
        sources = zip(self.sweep.tasks, self.sweep.task_sources)
        return {
            "sweep": self.sweep.name, "cells": [item.to_dict() for item in self.items], "counts": self.counts,
            "tasks": [{"task": task.label, "source": s.source, "reason": s.reason} for task, s in sources],
            "left_out": [{"combination": label, "reason": reason} for label, reason in self.sweep.left_out],
            "device_hours": round(self.seconds / 3600, 4), "gpu_hours": round(self.gpu_hours, 4), "cost": self.cost,
            "refusal": self.refusal,
        }  # fmt: skip

    def to_json(self, *, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)


def make_plan(
    sweep: Sweep,
    store: Store,
    machine: Machine | None = None,
    placement: Placement | None = None,
    *,
    max_gpu_hours: float | None = None,
    accept_base_scores: bool = False,
) -> Plan:
    """Decide every cell of a sweep, pinned here when it is not yet. ``placement``: one GPU where there is one.

    ``accept_base_scores``: also cells whose base model's scores are not the published ones (``sweeps.preflight``).

    Raises ValueError as ``pin`` does; everything else wrong is a refused cell or ``Plan.refusal``.
    """
    machine = machine or Machine.detect()
    placement = placement or Placement(num_gpus=min(1, machine.num_gpus))
    sweep = pin(sweep)
    doubts = {} if accept_base_scores else preflight.doubts(store, sweep)
    decide = _Decider(sweep, machine, placement, queries.snapshot(store), doubts)
    items = tuple(decide(cell) for cell in sweep.cells)
    plan = Plan(sweep=sweep, items=items, machine=machine, placement=placement)
    return replace(plan, refusal=_refusal(plan, store.url, max_gpu_hours))


class _Decider:
    """Decides cell after cell; looks things up once per base model."""

    def __init__(
        self, sweep: Sweep, machine: Machine, placement: Placement, known: queries.Snapshot, doubts: dict[str, str]
    ):
        self.sweep, self.machine, self.placement, self.known = sweep, machine, placement, known
        self.doubts = doubts
        self.bases: dict[str, BaseModel] = {base: resolve(base) for base in sweep.bases}
        unresolved = {cell.base for cell in sweep.cells if cell.revision == "unresolved"}
        self.missing = {b: why_not_at_hand(m, b in unresolved) if machine.is_here else "" for b, m in self.bases.items()}
        self.available = {
            task for task, source in zip(sweep.tasks, sweep.task_sources) if not (source.reason and machine.is_here)
        }

    def __call__(self, cell: Cell) -> PlanItem:
        key = cell.train_key
        state = self.known.states.get(key) or queries.CellState()
        keys = self.sweep.score_keys(cell)
        tasks = tuple((t, k) for t, k in keys if t in self.available and k not in self.known.scored)
        train = not cell.is_base and not state.published
        item = PlanItem(cell=cell, key=key, action="run", train=train, tasks=tasks)
        if not train and not tasks:
            return replace(item, action="skip", reason="done" if keys else "nothing to measure")
        if state.holder:
            return replace(item, action="wait", reason=f"claimed by {state.holder}")
        if state.failures["pruned"]:
            return replace(item, action="pruned", reason=state.last_reason)
        seconds = self._seconds(cell, train, tasks, state.resume_tokens)
        item = replace(item, seconds=seconds, memory=self._memory(cell))
        if reason := self._why_not(cell, state):
            return replace(item, action="refuse", reason=reason)
        if train and state.resume_tokens:
            reason = f"from token {state.resume_tokens:,}"
            return replace(item, action="resume", reason=reason, resume_tokens=state.resume_tokens)
        return item if train or cell.is_base else replace(item, reason="trained; scores are missing")

    def _why_not(self, cell: Cell, state: queries.CellState) -> str:
        if self.placement.num_gpus > self.machine.num_gpus:
            return f"wants {self.placement.num_gpus} GPUs, this machine has {self.machine.num_gpus}"
        if reason := self.missing[cell.base]:
            return reason
        if reason := retries.exhausted(state.failures, state.last_reason):
            return f"{reason}; golinear retry {cell.train_key} runs it again"
        if cell.train is None:
            return ""
        if self.machine.is_here:
            try:
                check_backbone(cell.backbone)
            except ValueError as error:
                return str(error)
        if reason := self.doubts.get(cell.base, ""):
            return reason
        on_gpu = self.placement.device.startswith("cuda")
        ranks = max(1, int(self.placement.num_gpus))
        if cell.train.batch_size % ranks:
            return f"batch_size {cell.train.batch_size} cannot be shared by {ranks} GPUs; allowed: a multiple of {ranks}"
        cards = min(1, self.placement.num_gpus) or 1
        available = self.machine.gpu_memory * cards if on_gpu else self.machine.memory
        needed = cost.minimum_memory(self.bases[cell.base].shape, cell.recipe, cell.train, self.placement)
        if available and needed > available:
            where = f"{cards:g} × {self.machine.gpu}" if on_gpu else "this machine"
            where = f"each of {ranks} × {self.machine.gpu}" if on_gpu and ranks > 1 else where
            return f"needs {needed / GIB:.1f} GiB at least, {where} has {available / GIB:.1f}"
        return ""

    def _memory(self, cell: Cell) -> float:
        shape = self.bases[cell.base].shape
        if cell.train is None:
            return shape.num_parameters * (2.0 if self.placement.device.startswith("cuda") else 4.0)
        measured = self.known.measured.get(cost.step_bytes_name(self.machine, cell))
        return cost.train_memory(shape, cell.recipe, cell.train, self.placement, measured)

    def _seconds(self, cell: Cell, train: bool, tasks: Any, resume_tokens: int) -> float:
        shape = self.bases[cell.base].shape
        seconds = sum(cost.task_seconds(shape, task, self.machine) for task, _ in tasks)
        seconds /= max(1, int(self.placement.num_gpus))
        if train and cell.train is not None:
            rate = self.known.measured.get(cost.throughput_name(self.machine, cell), 0.0) * max(1, int(self.placement.num_gpus))
            rate = rate or cost.tokens_per_second(shape, cell.train, self.machine, self.placement)
            seconds += max(0, cell.train.tokens - resume_tokens) / rate
        return seconds


def gpu_hours(sweep: Sweep, machine: Machine) -> float:
    """Of a whole sweep on one GPU a cell, nothing done yet: from shapes alone, without keys, weights, text or a store."""
    placement = Placement(num_gpus=1)
    shapes = {base: resolve(base).shape for base in sweep.bases}
    seconds = cost.START_SECONDS * len(shapes)
    for cell in sweep.cells:
        shape = shapes[cell.base]
        seconds += sum(cost.task_seconds(shape, task, machine) for task in sweep.tasks if applies(task, cell))
        if cell.train is not None:
            seconds += cell.train.tokens / cost.tokens_per_second(shape, cell.train, machine, placement)
    return seconds / 3600


def _refusal(plan: Plan, store_url: str, max_gpu_hours: float | None) -> str:
    """Why the whole plan may not start."""
    if plan.machine.num_nodes > 1 and store_url.startswith("sqlite"):
        return f"{plan.machine.num_nodes} nodes cannot share an SQLite file; set GOLINEAR_DATABASE_URL to a Postgres database"
    if plan.machine.num_nodes > 1 and tracking_uri().startswith("sqlite"):
        nodes = f"{plan.machine.num_nodes} nodes"
        return f"{nodes} and MLflow in an SQLite file; set MLFLOW_TRACKING_URI to a tracking server (golinear up starts one)"
    refused = [item for item in plan.items if item.action == "refuse"]
    if refused and not plan.to_do:
        return f"all {len(refused)} cells that are left are refused: {refused[0].reason}"
    if max_gpu_hours is not None and plan.gpu_hours > max_gpu_hours:
        return f"needs {plan.gpu_hours:.2f} GPU-hours, max_gpu_hours is {max_gpu_hours:g}"
    if plan.machine.is_here:
        shapes = {base: resolve(base).shape for base in plan.sweep.bases}
        needed = sum(_disk(shapes[item.cell.base], item) for item in plan.to_do if item.train)
        if needed > plan.machine.disk_free:
            return f"needs {needed / GIB:.1f} GiB of disk, {plan.machine.disk_free / GIB:.1f} are free"
    return ""


def _disk(shape: Shape, item: PlanItem) -> float:
    """New parameters, published once and in two checkpoints with Adam's two moments, and 1 MiB of scores and curves."""
    return cost.new_parameters(shape, item.cell.recipe) * 4.0 * (1 + 2 * 3) + (1 << 20)
