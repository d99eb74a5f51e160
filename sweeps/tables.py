"""From the store to tables: one tidy frame of all scores with provenance, and the summary view of it. Imports no torch.

Rules that tests hold: a missing value is never averaged in, only repeats (same setting, other seed) are averaged, rows
that differ in any setting are never merged, and a task that was not asked for is not the same as one that is missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import Score, TaskSpec
from sweeps import cost, published, queries
from sweeps.cell import Cell
from sweeps.grids import Sweep
from sweeps.store import Store

if TYPE_CHECKING:
    import pandas as pd

MEASURED, MISSING = "measured", "missing"
CACHE_LENGTH = 32768  # tokens at which cache bytes are compared
SETTINGS = ("base", "revision", "mechanism", "budget", "adaptation", "merge", "softmax_layers", "gate_bias", "learned_read_scale",
            "lora_rank", "lora_alpha", "conv_kernel")  # fmt: skip


def frame(store: Store, sweep: Sweep) -> pd.DataFrame:
    """All scores of a pinned sweep, a row for each cell × task × metric; a missing one is a row with its reason.

    Columns: key, setting, label, the axes (base, mechanism, budget, …, seed), task, metric, value, stderr, samples,
    status (measured, missing), reason, source, harness, flags, seconds, new_parameters, cache_bytes (at 32k tokens),
    tokens, minutes (of training), hardware, commit, at. Values as the harness gives them (accuracy in 0 … 1).
    """
    import pandas as pd

    found: dict[str, list[Score]] = {}
    for _, score_key, score in queries.scores_of(store):
        found.setdefault(score_key, []).append(score)
    origin = queries.provenance_of(store)
    reasons = {failure.key: f"{failure.cause}: {failure.reason}" for failure in queries.failures(store)}
    metrics = _metrics_of_tasks(sweep, found)
    rows: list[dict[str, Any]] = []
    for cell in sweep.cells:
        common = _axes(cell) | _provenance(origin.get(cell.train_key, {}))
        for (task, score_key), source in zip(sweep.score_keys(cell), sweep.task_sources):
            why = source.reason or reasons.get(cell.train_key) or "not measured yet"
            got = {score.metric: score for score in found.get(score_key, [])}
            rows += [
                common | _score_row(task, metric, got.get(metric), why)
                for metric in metrics[task]
                if metric in got or not got
            ]
            rows += [
                common | _score_row(task, metric, score, why)
                for metric, score in got.items()
                if metric not in metrics[task]
            ]
    return pd.DataFrame(rows, columns=None if rows else ["key", "setting", "task", "metric", "value", "status"])


def _metrics_of_tasks(sweep: Sweep, found: dict[str, list[Score]]) -> dict[TaskSpec, list[str]]:
    """The metrics that any cell of the sweep has for a task, in stored order; the task's main one when none has."""
    metrics: dict[TaskSpec, list[str]] = {task: [] for task in sweep.tasks}
    for cell in sweep.cells:
        for task, score_key in sweep.score_keys(cell):
            names = [score.metric for score in found.get(score_key, []) if score.value is not None]
            metrics[task] += [name for name in names if name not in metrics[task]]
    return {task: names or [main_metric(task)] for task, names in metrics.items()}


def main_metric(task: TaskSpec) -> str:
    """The metric a table shows for a task."""
    from linear_core.evaluate.tasks import TASKS

    return TASKS[task.name].metrics[0] if task.name in TASKS else "acc"


def _axes(cell: Cell) -> dict[str, Any]:
    from linear_core.models import resolve

    recipe, shape = cell.recipe, resolve(cell.base).shape
    axes = {
        "key": cell.train_key,
        "setting": cell.setting,
        "label": cell.label,
        "is_base": cell.is_base,
        "base": cell.base,
    }
    axes |= {"revision": cell.revision, "data": cell.data, "seed": cell.seed}
    axes |= recipe.to_dict() | {"budget": "" if cell.is_base else recipe.budget, "recipe": recipe.name}
    axes |= {"tokens": cell.train.tokens if cell.train else 0}
    axes |= {
        "new_parameters": cost.new_parameters(shape, recipe),
        "cache_bytes": cost.cache_bytes(shape, recipe, CACHE_LENGTH),
    }
    return axes


def _provenance(found: dict[str, Any]) -> dict[str, Any]:
    seconds = found.get("train_seconds")
    return {
        "minutes": None if seconds is None else seconds / 60,
        "hardware": found.get("hardware", ""),
        "commit": found.get("commit", ""),
        "at": found.get("at", ""),
    }


def _score_row(task: TaskSpec, metric: str, score: Score | None, why: str) -> dict[str, Any]:
    missing = score is None or score.value is None or not math.isfinite(score.value)
    row: dict[str, Any] = {
        "task": task.label,
        "task_name": task.name,
        "length": task.length,
        "limit": task.limit,
        "metric": metric,
    }
    row |= {"value": None if score is None or missing else score.value, "status": MISSING if missing else MEASURED}
    row |= {"stderr": score.stderr if score else None, "samples": score.samples if score else None}
    row |= {"reason": "" if not missing else ((score.reason or f"value is {score.value}") if score else why)}
    row |= {"source": score.source if score else "", "harness": score.harness if score else ""}
    return row | {"flags": ",".join(score.flags) if score else "", "eval_seconds": score.seconds if score else None}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One place of a table. ``value`` None: a dash with ``note``; an ``Entry`` that is not there at all: not asked for."""

    value: float | None = None
    spread: float | None = None  # standard deviation over seeds, None with one
    num_seeds: int = 1
    gap: float | None = None  # to the base model, in the value's unit
    published: float | None = None
    note: str = ""
    partial: bool = False  # some seeds are missing
    flags: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One measured column: task and metric, shown in ``unit`` (``%`` or plain), with the source of its data."""

    task: str
    metric: str
    unit: str
    higher_is_better: bool
    source: str = ""

    @property
    def title(self) -> str:
        return (
            self.task
            if self.metric in ("acc", "perplexity") and self.metric not in self.task
            else _title(self.task, self.metric)
        )


def _title(task: str, metric: str) -> str:
    return task if task.split("@")[0] == metric else f"{task} {metric}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting: what it is, its measured entries by column, and what it costs."""

    setting: str
    base: str
    recipe: str
    is_base: bool
    facts: dict[str, Any] = field(default_factory=dict)
    entries: dict[Column, Entry] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A finished table: rows in a stable order, base models before their cells; notes say why dashes are dashes."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def summary(data: pd.DataFrame, *, title: str = "", all_metrics: bool = False) -> Table:
    """Base models and settings with mean ± spread over seeds, gap to base, the published value, and cost.

    Shows each task's main metric, or all. Only seeds of one setting are averaged, and only those that have a value.
    """
    columns = _columns(data, all_metrics)
    groups = list(data.groupby("setting", sort=False)) if len(data) else []
    bases = {row.base: row for row in (_row(setting, part, columns, None) for setting, part in groups) if row.is_base}
    rows = [_row(setting, part, columns, bases.get(part["base"].iloc[0])) for setting, part in groups]
    notes = [
        f"{row.base} {row.recipe}, {column.title}: {entry.note}"
        for row in rows
        for column, entry in row.entries.items()
        if entry.note
    ]
    return Table(title=title, columns=columns, rows=tuple(rows), notes=tuple(notes))


def _columns(data: pd.DataFrame, all_metrics: bool) -> tuple[Column, ...]:
    columns: list[Column] = []
    if not len(data):
        return ()
    for (task, metric), part in data.groupby(["task", "metric"], sort=False):
        spec = TaskSpec(name=part["task_name"].iloc[0])
        if all_metrics or metric == _shown_metric(spec, list(data.loc[data["task"] == task, "metric"].unique())):
            better = not _is_loss(metric)
            sources = "; ".join(sorted({s for s in part["source"] if s}))
            columns.append(
                Column(task=task, metric=metric, unit="%" if better else "", higher_is_better=better, source=sources)
            )
    return tuple(columns)


def _shown_metric(task: TaskSpec, available: Sequence[str]) -> str:
    wanted = main_metric(task)
    return wanted if wanted in available else available[0]


def _is_loss(metric: str) -> bool:
    return any(word in metric for word in ("perplexity", "kl", "bits", "loss", "nmse"))


def _row(setting: str, part: pd.DataFrame, columns: Iterable[Column], base: Row | None) -> Row:
    first = part.iloc[0]
    entries = {}
    for column in columns:
        asked = part[(part["task"] == column.task) & (part["metric"] == column.metric)]
        if len(asked):
            entries[column] = _entry(asked, column, None if base is None else base.entries.get(column))
    minutes = part.drop_duplicates("key")["minutes"].dropna()
    facts = {
        name: first[name] for name in ("new_parameters", "cache_bytes", "tokens", "mechanism", "budget", "adaptation")
    }
    facts |= {"minutes": float(minutes.mean()) if len(minutes) else None, "seeds": part["seed"].nunique()}
    return Row(
        setting=setting, base=first["base"], recipe="base" if first["is_base"] else first["recipe"],
        is_base=bool(first["is_base"]), facts=facts, entries=entries,
    )  # fmt: skip


def _entry(asked: pd.DataFrame, column: Column, base: Entry | None) -> Entry:
    scale = 100.0 if column.unit == "%" else 1.0
    there = asked[asked["status"] == MEASURED]
    note = "; ".join(dict.fromkeys(asked.loc[asked["status"] == MISSING, "reason"]))
    fact = published.value_of(asked.iloc[0], column)
    if not len(there):
        return Entry(note=note, published=fact, num_seeds=0)
    values = [float(value) * scale for value in there["value"]]
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None
    gap = None if base is None or base.value is None or asked.iloc[0]["is_base"] else mean - base.value
    flags = ",".join(dict.fromkeys(flag for flag in there["flags"] if flag))
    return Entry(
        value=mean, spread=spread, num_seeds=len(values), gap=gap, published=fact, note=note,
        partial=len(there) < len(asked), flags=flags,
    )  # fmt: skip
