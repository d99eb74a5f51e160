"""The published numbers (package data) as facts to stand beside ours. Imports neither torch nor pandas."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings

if TYPE_CHECKING:
    from sweeps.tables import Column

SOURCE = "arXiv 2607.07706"
Identity = tuple[str, str, str, str, str, str]  # base, mechanism, window, sinks, adaptation, task


@cache
def rows() -> list[dict[str, str]]:
    """All rows of published_results.csv, by column name, as text."""
    text = files("sweeps").joinpath("data/published_results.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def _facts() -> dict[Identity, float]:
    """Identity → mean in per cent. The base model stands in several tables with one value: the first is kept."""
    found: dict[Identity, float] = {}
    for row in rows():
        identity = (
            row["base_model"],
            row["mechanism"],
            _whole(row["window"]),
            _whole(row["sinks"]),
            row["adaptation"],
            row["task"],
        )
        found.setdefault(identity, float(row["mean"]))
    return found


def _whole(text: str) -> str:
    return str(int(float(text))) if text else ""


def value_of(record: Mapping[str, Any], column: Column) -> float | None:
    """The published value of a frame's row in a column, in per cent; None unless every setting is the published one."""
    if record["is_base"]:
        return base_value(record["base"], column.spec, column.metric)
    if not _as_published(record):
        return None
    recipe = (record["mechanism"], str(record["window"]), str(record["sinks"]), record["adaptation"])
    return _value(record["base"], recipe, column.spec, column.metric)


def base_value(base: str, task: TaskSpec, metric: str) -> float | None:
    """The published value of an unconverted model in per cent, None when there is none for the task as it is asked."""
    return _value(base, ("softmax", "", "", "none"), task, metric)


def _value(base: str, recipe: tuple[str, str, str, str], task: TaskSpec, metric: str) -> float | None:
    from linear_core.evaluate.tasks import TASKS
    from linear_core.models import REGISTRY

    known, model = TASKS.get(task.name), REGISTRY.get(base)
    if known is None or model is None or not (known.published and model.published) or metric != known.metrics[0]:
        return None
    if task.limit is not None or task.shots not in (None, known.shots):
        return None
    return _facts().get((model.published, *recipe, task_name(task)))


def task_name(task: TaskSpec) -> str:
    """What the published tables call a task, "" when they do not have it."""
    from linear_core.evaluate.tasks import TASKS

    name = TASKS[task.name].published if task.name in TASKS else ""
    return f"{name}_{task.length}" if name and task.length is not None else name


def peers(base: str) -> dict[str, dict[str, float]]:
    """Other methods' published values on a base model of the registry: name with its cache → task → per cent."""
    from linear_core.models import REGISTRY
    from linear_core.recipe import MECHANISMS

    found: dict[str, dict[str, float]] = {}
    name_of_base = REGISTRY[base].published if base in REGISTRY else ""
    for row in rows():
        if name_of_base and row["base_model"] == name_of_base and row["mechanism"] not in (*MECHANISMS, "softmax"):
            cache = _whole(row["window"])
            name = row["mechanism"] + (f", cache {cache}" if cache else "")
            found.setdefault(name, {})[row["task"]] = float(row["mean"])
    return found


def _as_published(record: Mapping[str, Any]) -> bool:
    """Whether recipe and training are the paper's in all that the published rows do not name."""
    recipe = Recipe(mechanism=record["mechanism"], window=record["window"], sinks=record["sinks"])
    wanted = {k: v for k, v in recipe.to_dict().items() if k != "adaptation"} | TrainSettings().to_dict()
    wanted["learning_rate"] = TrainSettings().peak_learning_rate(record["adaptation"])
    return all(record[name] == value for name, value in wanted.items())
