"""A sweep: cells, base models first, and their tasks; and ``pin``, which looks up what identity needs.

Frozen values. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from sweeps.cell import Cell


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """Where a task's data comes from and which harness scores it: part of a score's identity."""

    source: str = ""
    harness: str = ""
    reason: str = ""  # why it cannot run here, and how to get it; "" when it can


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A named list of cells, base models first, and the tasks each is measured on."""

    name: str
    cells: tuple[Cell, ...]
    tasks: tuple[TaskSpec, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (combination, why it means nothing)
    source: str = "auto"  # of the training text
    task_sources: tuple[TaskSource, ...] = ()  # one per task, once pinned

    @property
    def pinned(self) -> bool:
        return len(self.task_sources) == len(self.tasks) and all(
            cell.revision and (cell.is_base or cell.data) for cell in self.cells
        )

    @property
    def bases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.base for cell in self.cells))

    def score_keys(self, cell: Cell) -> tuple[tuple[TaskSpec, str], ...]:
        """Each task that applies to this cell, with the key of its scores. The sweep must be pinned."""
        return tuple(
            (task, cell.score_key(task, source=source.source, harness=source.harness))
            for task, source in zip(self.tasks, self.task_sources, strict=True)
            if applies(task, cell)
        )

    def source_of(self, task: TaskSpec) -> TaskSource:
        return self.task_sources[self.tasks.index(task)]

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "cells": [cell.to_dict() for cell in self.cells]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sweep:
        return cls(
            name=data["name"],
            cells=tuple(Cell.from_dict(cell) for cell in data["cells"]),
            tasks=tuple(TaskSpec(**task) for task in data["tasks"]),
            left_out=tuple((str(a), str(b)) for a, b in data["left_out"]),
            source=data["source"],
            task_sources=tuple(TaskSource(**source) for source in data["task_sources"]),
        )


def applies(task: TaskSpec, cell: Cell) -> bool:
    """Whether a task asks anything of a cell: attribution needs a state to attribute to, diagnostics a linearized layer."""
    if task.name == "diagnostics":
        return not cell.is_base
    return task.name != "attribution" or cell.recipe.mechanism not in ("softmax", "none")


def with_tasks(sweep: Sweep, tasks: Iterable[TaskSpec]) -> Sweep:
    """The same cells measured on other tasks: nothing is trained again."""
    return dataclasses.replace(sweep, tasks=tuple(tasks), task_sources=())


def join(name: str, *parts: Sweep) -> Sweep:
    """One sweep of several, each cell and task once. Raises ValueError when their training texts differ."""
    if len({part.source for part in parts}) > 1:
        raise ValueError(f"sweeps with different training texts are not one: {sorted({part.source for part in parts})}")
    cells = dict.fromkeys(cell for part in parts for cell in part.cells)
    tasks = dict(
        pair for part in parts for pair in zip(part.tasks, part.task_sources or [None] * len(part.tasks), strict=True)
    )
    sources = tuple(source for source in tasks.values() if source is not None)
    return Sweep(
        name=name,
        cells=tuple(sorted(cells, key=lambda cell: not cell.is_base)),
        tasks=tuple(tasks),
        left_out=tuple(dict.fromkeys(pair for part in parts for pair in part.left_out)),
        source=parts[0].source,
        task_sources=sources if len(sources) == len(tasks) else (),
    )


def pin(sweep: Sweep) -> Sweep:
    """The sweep with base revisions, data fingerprint and task sources looked up: once per model, not per cell.

    Raises ValueError for an unknown task, an unreadable training text or a model folder that is gone.
    """
    if sweep.pinned:
        return sweep
    from linear_core.models import resolve
    from sweeps.weights import revision_of

    revisions = {base: revision_of(resolve(base)) for base in sweep.bases}
    data = "" if all(cell.is_base for cell in sweep.cells) else _fingerprint(sweep.source)
    cells = tuple(
        dataclasses.replace(
            cell,
            revision=cell.revision or revisions[cell.base],
            data=cell.data or ("" if cell.is_base else data),
        )
        for cell in sweep.cells
    )
    return dataclasses.replace(sweep, cells=cells, task_sources=tuple(task_source(task) for task in sweep.tasks))


def _fingerprint(source: str) -> str:
    from linear_core.sources import data_fingerprint

    return data_fingerprint(source)


def task_source(task: TaskSpec) -> TaskSource:
    """Source and harness of one task. Raises ValueError when the task is not known, naming what is."""
    from linear_core.evaluate.run import check_task, data_source, harness_version

    check_task(task)
    source, available, reason = data_source(task)
    return TaskSource(source=source, harness=harness_version(task), reason="" if available else reason)
