"""From a user's words (command line, Prefect parameters) to a Sweep: parsed and checked here. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from sweeps import grids, parameters
from sweeps.cell import Cell
from sweeps.sweep import Sweep

# What each parameter is, shown by `golinear plan --help` and on the deployment's page in Prefect.
HELP = {
    "models": "base models: names of the registry, folders or hub ids",
    "mechanisms": "none, gla, gdn, …",
    "budgets": "window+sinks of exact attention, e.g. 56+8,64+0,0+0",
    "adaptations": "none, conv, lora",
    "seeds": "e.g. 1,2,3",
    "recipes": "instead of the axes: a list of recipes, e.g. 'gla 56+8,gdn 64+0,gdn 56+8 conv'",
    "merges": "sum, shared, mass; default: the mechanism's own",
    "softmax_layers": "layers that keep softmax attention: none, uniform:0.2, list:0,5,9, hardest:0.2",
    "tokens": "training tokens of a cell, e.g. 10.24M, 4096",
    "sequence_length": "tokens of a training sequence",
    "batch_size": "sequences of an optimiser step",
    "learning_rate": "0: the paper's (2e-3, with LoRA 5e-4)",
    "warmup_steps": "optimiser steps of linear warm-up",
    "objective": "ce, kl, layerwise, or a chain such as layerwise:1M,ce:9M",
    "backbone": "how frozen layers are kept: full, or int8 (8-bit weights; needs golinear[int8])",
    "tasks": "what to measure, name[@length][:limit], e.g. perplexity:4096,lambada_openai:40,niah_single_1@512:8",
    "limit": "items a task, for tasks that name none; or task=items,…",
    "lengths": "prompt lengths of RULER tasks that name none",
    "data": "training text: auto, local:PATH, hub:NAME, self",
    "name": "name of the sweep, for its MLflow run and table",
}
AXES = ("mechanisms", "budgets", "adaptations", "merges", "softmax_layers")
SETTINGS = ("sequence_length", "batch_size", "warmup_steps")
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TASKS = "perplexity:65536,agreement:65536,lambada_openai:500,niah_single_1@1024:50"


def build(grid: str = "ablation", **given: Any) -> Sweep:
    """The sweep that ``grid`` and the parameters of ``HELP`` describe; None and "" mean the grid's default.

    Raises ValueError, saying what is allowed, for an unknown grid, parameter, model, mechanism, budget or task and for
    numbers that are negative, nan or infinite.
    """
    if unknown := sorted(set(given) - set(HELP)):
        raise ValueError(f"parameter {', '.join(unknown)} is not known; allowed: {', '.join(HELP)}")
    if grid not in grids.GRIDS:
        raise ValueError(f"grid {grid!r} is not known; allowed: {', '.join(grids.GRIDS)}")
    given = {name: value for name, value in given.items() if value not in (None, "")}
    common: dict[str, Any] = {
        "source" if name == "data" else name: given[name] for name in ("data", "name") if name in given
    }
    if "tasks" in given or grid == "ablation":
        wanted = given.get("tasks", DEFAULT_TASKS)
        common["tasks"] = parameters.tasks(wanted, limit=given.get("limit"), lengths=given.get("lengths"))
    if "seeds" in given:
        common["seeds"] = parameters.whole_numbers(given["seeds"], "seeds")
    if settings := _settings(given):
        common["train"] = settings
    if "models" in given or grid == "ablation":
        common["models"] = given.get("models", DEFAULT_MODEL)
    if "recipes" in given:
        if clash := [axis for axis in AXES if axis in given]:
            raise ValueError(f"recipes says everything about the models; leave out {', '.join(clash)}")
        return _listed(recipes=parameters.items(given["recipes"], "recipes"), **{"name": grid, **common})
    return grids.GRIDS[grid](**{axis: given[axis] for axis in AXES if axis in given}, **common)


def _settings(given: dict[str, Any]) -> TrainSettings | None:
    """Training settings when one of them was given; the others keep the paper's value."""
    values: dict[str, Any] = {}
    if "tokens" in given:
        values["tokens"] = parameters.tokens(given["tokens"])
    for name in SETTINGS:
        if name in given:
            values[name] = parameters.whole_numbers(given[name], name)[0]
    if "learning_rate" in given:
        values["learning_rate"] = parameters.number(given["learning_rate"], "learning_rate")
    for name in ("objective", "backbone"):
        if name in given:
            values[name] = given[name]
    return TrainSettings(**values) if values else None


def _listed(
    *,
    recipes: list[str],
    models: Any = DEFAULT_MODEL,
    seeds: Sequence[int] = (1,),
    train: TrainSettings | None = None,
    tasks: tuple[TaskSpec, ...] = (),
    source: str = "auto",
    name: str,
) -> Sweep:
    """Base models in front, then each recipe by itself: for sweeps that are no product of axes."""
    made = [Recipe.parse(text) for text in recipes]
    train = train or TrainSettings()
    cells: list[Cell] = []
    for base in grids.known_models(models):
        cells.append(Cell.base_model(base))
        cells += [Cell(base=base, recipe=recipe, train=train, seed=seed) for recipe in made for seed in seeds]
    return Sweep(name=name, cells=tuple(dict.fromkeys(cells)), tasks=tasks, source=source)
