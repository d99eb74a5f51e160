"""What to run: grids are pure functions that return frozen values. Imports no torch.

``ablation`` is the general grid; a published table is a call of it. Combinations that mean nothing are left out with
the reason kept (``Sweep.left_out``). ``pin`` looks up what identity needs from the outside: the revision of the weights,
the content of the training text, the source and harness of each task.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import MERGES, Recipe, parse_budget
from linear_core.settings import TrainSettings
from sweeps import parameters
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
        """Each task with the key of its scores on this cell. The sweep must be pinned."""
        return tuple(
            (task, cell.score_key(task, source=source.source, harness=source.harness))
            for task, source in zip(self.tasks, self.task_sources, strict=True)
        )

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


def ablation(
    models: str | Sequence[str],
    mechanisms: str | Sequence[str] = ("gla", "gdn"),
    budgets: str | Sequence[str] = ("56+8",),
    adaptations: str | Sequence[str] = ("none",),
    seeds: str | int | Sequence[int] = (1,),
    *,
    tasks: str | Sequence[str] | Sequence[TaskSpec] = (),
    merges: str | Sequence[str] = ("",),
    softmax_layers: str | Sequence[str] = ("none",),
    train: TrainSettings | None = None,
    recipe: dict[str, Any] | None = None,
    source: str = "auto",
    name: str = "ablation",
) -> Sweep:
    """Every combination of the axes, with the base models in front.

    Lists may come in any spelling of ``parameters.items``. ``merges``: "" is the mechanism's own. ``train``: the paper's
    unless given. ``recipe``: further fields of Recipe for all cells (gate_bias, …). Raises ValueError naming what is
    allowed for an unknown model, mechanism, budget, adaptation, merge; an impossible combination is left out instead.
    """
    train = train or TrainSettings()
    axes = {
        "mechanism": _checked(mechanisms, "mechanisms", lambda word: Recipe(mechanism=word, window=1, sinks=0)),
        "budget": _checked(budgets, "budgets", parse_budget),
        "adaptation": _checked(adaptations, "adaptations", lambda word: Recipe(adaptation=word)),
        "merge": [""] if merges in ("", ("",), [""]) else _checked(merges, "merges", _known_merge),
        "softmax_layers": _layer_choices(softmax_layers),
    }
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    repeats = parameters.whole_numbers(seeds, "seeds")
    for base in known_models(models):
        cells.append(Cell.base_model(base))
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values))
            try:
                made = _recipe(chosen, recipe or {})
            except ValueError as error:
                left_out.append((_words(chosen), str(error)))
                continue
            if made.mechanism != "softmax":
                cells += [Cell(base=base, recipe=made, train=train, seed=seed) for seed in repeats]
    specs = tasks if _are_specs(tasks) else parameters.tasks(tasks)
    return Sweep(
        name=name,
        cells=tuple(dict.fromkeys(cells)),
        tasks=tuple(specs),
        left_out=tuple(dict.fromkeys(left_out)),
        source=source,
    )  # type: ignore[arg-type]


def _recipe(chosen: dict[str, str], extra: dict[str, Any]) -> Recipe:
    if chosen["mechanism"] == "softmax":
        return Recipe(mechanism="softmax", window=0, sinks=0)
    window, sinks = parse_budget(chosen["budget"])
    fixed = {k: v for k, v in chosen.items() if k != "budget"}
    return Recipe(window=window, sinks=sinks, **fixed, **extra)


def _words(chosen: dict[str, str]) -> str:
    """A combination as recipes are written, e.g. ``none 0+0 conv``."""
    further = (chosen[axis] for axis in ("adaptation", "merge", "softmax_layers"))
    return " ".join([chosen["mechanism"], chosen["budget"], *(word for word in further if word not in ("", "none"))])


def _checked(value: Any, name: str, check: Any) -> list[str]:
    words = parameters.items(value, name)
    for word in words:
        check(word)
    return [word.replace(" ", "") for word in words]


def _known_merge(word: str) -> None:
    if word not in MERGES:
        raise ValueError(f"merge {word!r} is not known; allowed: {', '.join(MERGES)}")


def _layer_choices(value: str | Sequence[str]) -> list[str]:
    """``list:0,5,9`` has commas of its own, so a string is one choice; several come as a list."""
    return [value] if isinstance(value, str) else list(dict.fromkeys(value))


def _are_specs(tasks: Any) -> bool:
    return isinstance(tasks, (tuple, list)) and all(isinstance(task, TaskSpec) for task in tasks)


def known_models(models: str | Sequence[str]) -> list[str]:
    """The names as cells carry them. Raises ValueError as ``linear_core.models.resolve`` does."""
    from linear_core.models import REGISTRY, resolve

    words = parameters.items(models, "models")
    for word in words:
        if word not in REGISTRY:
            resolve(word)
    return words


def with_tasks(sweep: Sweep, tasks: Iterable[TaskSpec]) -> Sweep:
    """The same cells measured on other tasks: nothing is trained again."""
    return dataclasses.replace(sweep, tasks=tuple(tasks), task_sources=())


def pin(sweep: Sweep) -> Sweep:
    """The sweep with base revisions, data fingerprint and task sources looked up: once per model, not per cell.

    Raises ValueError for an unknown task, an unreadable training text or a model folder that is gone.
    """
    if sweep.pinned:
        return sweep
    from linear_core.models import resolve, revision

    revisions = {base: revision(resolve(base)) for base in sweep.bases}
    trained = any(not cell.is_base for cell in sweep.cells)
    data = _fingerprint(sweep.source) if trained else ""
    cells = tuple(
        dataclasses.replace(
            cell, revision=cell.revision or revisions[cell.base], data=cell.data or ("" if cell.is_base else data)
        )
        for cell in sweep.cells
    )
    return dataclasses.replace(sweep, cells=cells, task_sources=tuple(task_source(task) for task in sweep.tasks))


def _fingerprint(source: str) -> str:
    from linear_core.data import data_fingerprint

    return data_fingerprint(source)


def task_source(task: TaskSpec) -> TaskSource:
    """Source and harness of one task. Raises ValueError when the task is not known, naming what is."""
    from linear_core.evaluate.run import check_task, data_source

    check_task(task)
    source, available, reason = data_source(task)
    return TaskSource(source=source, harness=harness_of(task), reason="" if available else reason)


def harness_of(task: TaskSpec) -> str:
    """``lm-eval 0.4.13`` for the harness's tasks; our own measures have no version but ``EVALUATOR_VERSION``."""
    from importlib.metadata import version

    return "golinear" if task.name in ("perplexity", "agreement", "kl") else f"lm-eval {version('lm_eval')}"
