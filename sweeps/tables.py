"""From the store to tables: one tidy frame of all scores with provenance, and the summary view of it. Imports no torch.

Rules that tests hold: a missing value is never averaged in, only repeats (same setting, other seed) are averaged, rows
that differ in any setting are never merged, a task that was not asked for is not the same as one that is missing, and
a converted model's score is not shown without its base model's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.evaluate.statistics import mean_and_spread
from linear_core.settings import TrainSettings
from sweeps import cost, items, published, queries
from sweeps.cell import Cell
from sweeps.compare import difference, standard_error
from sweeps.store import Store
from sweeps.sweep import Sweep, TaskSource

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
MEASURED, MISSING = "measured", "missing"
CACHE_LENGTH = 32768  # tokens at which cache bytes are compared
WHOLE = ("seed", "length", "limit", "shots", "task_seed", "samples", "tokens", "sequence_length", "batch_size",
         "warmup_steps", "base_parameters", "new_parameters", "cache_bytes", "window", "sinks", "lora_rank", "lora_alpha",
         "conv_kernel")  # fmt: skip
PER_CENT = ("acc", "acc_norm", "top1")  # shares of items, shown in per cent; all other metrics as they are
HIGHER = (*PER_CENT, "state_nats", "tokens_per_s", "prefill_tokens_per_s")  # of every other metric (kl, …) less is better
NO_QUALITY = ("attribution", "diagnostics", "latency")  # tasks that say how a model works, not how well


def frame(store: Store, sweep: Sweep) -> pd.DataFrame:
    """All scores of a pinned sweep, a row for each cell × task × metric; a missing one is a row with its reason.

    Columns: key, setting, label, the axes (base, mechanism, budget, …, seed), training settings, task, metric, value,
    stderr, samples, status (measured, missing), reason, source, harness, flags, base_parameters, new_parameters,
    cache_bytes (after 32k tokens), tokens, minutes (of training), gpus, hardware, commit, at; items and values: per-item results, packed
    (``sweeps.items``). Values as the harness gives them (accuracy in 0 … 1).
    """
    found: dict[str, list[Score]] = {}
    for _, score_key, score in queries.scores_of(store):
        found.setdefault(score_key, []).append(score)
    origin = queries.provenance_of(store)
    failed = {failure.key: f"{failure.cause}: {failure.reason}" for failure in queries.failures(store)}
    metrics = _metrics_of_tasks(sweep, found)
    rows: list[Record] = []
    for cell in sweep.cells:
        common = _axes(cell) | _provenance(origin.get(cell.train_key, {}))
        for task, score_key in sweep.score_keys(cell):
            source = sweep.source_of(task)
            got = {score.metric: score for score in found.get(score_key, [])}
            why = source.reason or failed.get(cell.train_key) or "not measured yet"
            names = dict.fromkeys([*got, *metrics[task]])
            rows += [common | _score_row(task, source, metric, got.get(metric), why) for metric in names]
    return from_records(rows)


def concat(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Several sweeps' frames as one; a score that is in two of them is kept once."""
    rows: dict[tuple[Any, ...], Record] = {}
    for row in (row for data in frames for row in records(data)):
        same = (row["key"], _column_key(row))
        if same not in rows or rows[same]["status"] == MISSING:
            rows[same] = row
    return from_records(list(rows.values()))


def render(data: pd.DataFrame, format: str = "markdown", *, title: str = "", show: str = "summary") -> str:
    """The summary of a frame as markdown, csv, latex, html, json or text (``sweeps.render``)."""
    from sweeps.render import render as write

    return write(data, format, title=title, show=show)


def from_records(rows: list[Record]) -> pd.DataFrame:
    """A frame of rows as dicts, None for what is not there."""
    import pandas as pd

    data = pd.DataFrame(rows)
    return data.astype({name: "Int64" for name in WHOLE if name in data})


def records(data: pd.DataFrame) -> list[Record]:
    """Rows as dicts with None for what is not there, whole numbers whole."""
    import pandas as pd

    return [
        {name: None if value is None or value is pd.NA or value != value else value for name, value in row.items()}
        for row in data.to_dict("records")
    ]


def _metrics_of_tasks(sweep: Sweep, found: dict[str, list[Score]]) -> dict[TaskSpec, list[str]]:
    """The metrics that any cell of the sweep has a value of, per task; the task's main one when none has."""
    metrics: dict[TaskSpec, list[str]] = {task: [] for task in sweep.tasks}
    for cell in sweep.cells:
        for task, score_key in sweep.score_keys(cell):
            names = [score.metric for score in found.get(score_key, []) if score.value is not None]
            metrics[task] += [name for name in names if name not in metrics[task]]
    return {task: names or [main_metric(task.name)] for task, names in metrics.items()}


def main_metric(task: str) -> str:
    """The metric a table shows for a task."""
    from linear_core.evaluate.tasks import TASKS

    return TASKS[task].metrics[0] if task in TASKS else "acc"


def _axes(cell: Cell) -> Record:
    from linear_core.models import resolve

    recipe, shape = cell.recipe, resolve(cell.base).shape
    axes = {"key": cell.train_key, "setting": cell.setting, "label": cell.label, "is_base": cell.is_base}
    axes |= {"base": cell.base_label, "base_setting": cell.base_of().setting}
    axes |= {"revision": cell.revision, "data": cell.data, "seed": cell.seed}
    axes |= recipe.to_dict() | {"budget": "" if cell.is_base else recipe.budget, "recipe": recipe.name}
    train = cell.train.to_dict() if cell.train else dict.fromkeys(TRAIN_FIELDS)
    if cell.train:
        train["learning_rate"] = cell.train.peak_learning_rate(recipe.adaptation)
    axes |= train
    return axes | {
        "base_parameters": shape.num_parameters,
        "new_parameters": cost.new_parameters(shape, recipe),
        "cache_bytes": cost.cache_bytes(shape, recipe, CACHE_LENGTH),
    }


def _provenance(found: Record) -> Record:
    seconds = found.get("train_seconds")
    minutes = None if seconds is None else seconds / 60
    training, placement = found.get("training", {}), found.get("placement", {})
    how = {"minutes": minutes, "gpus": placement.get("num_gpus")}
    how |= {"loss": training.get("loss"), "tokens_per_second": training.get("tokens_per_second")}
    return how | {name: found.get(name, "") for name in ("hardware", "commit", "dirty", "environment", "at")}


def _score_row(task: TaskSpec, source: TaskSource, metric: str, score: Score | None, why: str) -> Record:
    there = score is not None and score.value is not None and math.isfinite(score.value)
    if there:
        why = ""
    elif score is not None:
        why = score.reason or f"its value is {score.value}"
    row: Record = {
        "task": task.label, "task_name": task.name, "length": task.length, "limit": task.limit, "shots": task.shots,
        "task_seed": task.seed, "metric": metric, "value": score.value if score and there else None,
        "status": MEASURED if there else MISSING, "reason": why, "source": source.source, "harness": source.harness,
    }  # fmt: skip
    row |= {"stderr": score.stderr if score else None, "samples": score.samples if score else None}
    row |= {"flags": ", ".join(score.flags) if score else "", "eval_seconds": score.seconds if score else None}
    return row | (items.of(score) if score and there else {"items": None, "values": None})


@dataclass(frozen=True, kw_only=True)
class Column:
    """One measured column: a task as it was asked, its metric, and where its data and code came from."""

    spec: TaskSpec
    metric: str
    source: str = ""
    harness: str = ""
    title: str = ""
    samples: int | None = None

    @property
    def higher_is_better(self) -> bool:
        return self.metric.split(".")[0] in HIGHER

    @property
    def is_quality(self) -> bool:
        return self.spec.name not in NO_QUALITY

    @property
    def scale(self) -> float:
        return 100.0 if self.metric.split(".")[0] in PER_CENT else 1.0


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One place of a table. ``value`` None: a dash with ``note``. No ``Entry`` at all: not asked for."""

    value: float | None = None
    spread: float | None = None  # standard deviation over seeds, None with one
    error: float | None = None  # standard error: of the seeds' mean, else of the items
    num_seeds: int = 0
    gap: float | None = None  # to the base model, in the value's unit (points)
    kept: float | None = None  # per cent of the base model's value
    published: float | None = None
    best: bool = False  # of its base model's cells, by more than chance
    partial: bool = False  # some seeds are missing
    flags: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting: what it is, its measured entries by column, and what it costs."""

    setting: str
    base_setting: str  # of the base model's own row
    base: str
    recipe: str
    is_base: bool
    facts: Record = field(default_factory=dict)
    entries: dict[Column, Entry] = field(default_factory=dict)
    samples: dict[Column, tuple[Record, ...]] = field(default_factory=dict, repr=False)  # the frame's rows behind each


@dataclass(frozen=True, kw_only=True)
class Table:
    """A finished table: base models before their cells, in the sweep's order."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


def summary(data: pd.DataFrame, *, title: str = "", all_metrics: bool = False) -> Table:
    """Base models and settings with mean ± spread over seeds, gap to base, the published value, and cost.

    Shows each task's main metric, or all. Only seeds of one setting are averaged, and only those that have a value.
    """
    found = records(data)
    columns = _columns(found, all_metrics)
    groups: dict[str, list[Record]] = {}
    for record in found:
        groups.setdefault(record["setting"], []).append(record)
    names = _names({setting: rows[0] for setting, rows in groups.items()})
    rows = [_row(setting, names[setting], part, columns) for setting, part in groups.items()]
    bases = {row.setting: row for row in rows if row.is_base}
    rows = [row if row.is_base else _against(row, bases.get(row.base_setting)) for row in rows]
    order = list(dict.fromkeys(row.base_setting for row in rows))
    for base in order:
        rows = _mark_best(rows, base, columns)
    rows.sort(key=lambda row: (order.index(row.base_setting), not row.is_base))
    return Table(title=title, columns=columns, rows=tuple(rows))


def _column_key(record: Record) -> tuple[Any, ...]:
    names = ("task_name", "length", "limit", "shots", "task_seed", "metric", "source", "harness")
    return tuple(record[name] for name in names)


def _columns(records: Sequence[Record], all_metrics: bool) -> tuple[Column, ...]:
    parts: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        parts.setdefault(_column_key(record), []).append(record)
    available: dict[tuple[Any, ...], list[str]] = {}
    for key in parts:
        available.setdefault((*key[:5], *key[6:]), []).append(key[5])
    columns = []
    for key, part in parts.items():
        metrics = available[(*key[:5], *key[6:])]
        main = main_metric(key[0])
        if all_metrics or key[5] == (main if main in metrics else metrics[0]):
            spec = TaskSpec(name=key[0], length=key[1], limit=key[2], shots=key[3], seed=key[4])
            samples = max((record["samples"] or 0 for record in part), default=0) or None
            columns.append(Column(spec=spec, metric=key[5], source=key[6], harness=key[7], samples=samples))
    return _titled(columns)


def _titled(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Short titles: the task, its metric when it is no accuracy; limit and source only where two would read alike."""
    plain = ("acc", "acc_norm")
    titles = [c.spec.label if c.metric in (*plain, c.spec.name) else f"{c.spec.label} {c.metric}" for c in columns]
    for extra in (
        lambda c: c.metric,
        lambda c: f"limit {c.spec.limit}",
        lambda c: f"seed {c.spec.seed}",
        lambda c: c.source,
    ):
        titles = [
            f"{title} {extra(column)}" if titles.count(title) > 1 else title for title, column in zip(titles, columns)
        ]
    return tuple(replace(column, title=title) for column, title in zip(columns, titles))


TRAIN_FIELDS = tuple(field.name for field in dataclasses.fields(TrainSettings))
TELLING = ("revision", "data", *TRAIN_FIELDS, "lora_rank", "lora_alpha", "conv_kernel")


FACTS = ("mechanism", "budget", "window", "sinks", "adaptation", "base_parameters", "new_parameters", "cache_bytes", "tokens")


def _names(settings: dict[str, Record]) -> dict[str, str]:
    """Name of each setting: its recipe, with whatever else tells it from another of the same recipe and base model."""
    names = {}
    for setting, row in settings.items():
        twins = [r for r in settings.values() if (r["base"], r["recipe"]) == (row["base"], row["recipe"])]
        telling = [name for name in TELLING if len({repr(twin[name]) for twin in twins}) > 1]
        words = [f"{name}={row[name]}" for name in telling]
        names[setting] = " ".join(["base" if row["is_base"] else row["recipe"], *words])
    return names


def _row(setting: str, name: str, part: Sequence[Record], columns: Sequence[Column]) -> Row:
    first = part[0]
    samples = {}
    for column in columns:
        key = (column.spec.name, column.spec.length, column.spec.limit, column.spec.shots, column.spec.seed,
               column.metric, column.source, column.harness)  # fmt: skip
        if asked := tuple(record for record in part if _column_key(record) == key):
            samples[column] = asked
    minutes = list({record["key"]: record["minutes"] for record in part if record["minutes"] is not None}.values())
    facts = {k: first[k] for k in FACTS}
    facts |= {"minutes": sum(minutes) / len(minutes) if minutes else None, "gpus": first["gpus"]}
    facts |= {"seeds": len({record["seed"] for record in part})}
    return Row(
        setting=setting, base_setting=first["base_setting"], base=first["base"], recipe=name,
        is_base=first["is_base"], facts=facts, samples=samples,
        entries={column: _entry(asked, column) for column, asked in samples.items()},
    )  # fmt: skip


def _entry(asked: Sequence[Record], column: Column) -> Entry:
    """Mean over the seeds that have a value; ``partial`` and a note when some have none."""
    there = [record for record in asked if record["status"] == MEASURED]
    note = "; ".join(dict.fromkeys(record["reason"] for record in asked if record["status"] == MISSING))
    fact = published.value_of(asked[0], column)
    if not there:
        return Entry(note=note, published=fact)
    values = [record["value"] * column.scale for record in there]
    mean, spread = mean_and_spread(values)
    error = standard_error(values, None if there[0]["stderr"] is None else there[0]["stderr"] * column.scale)
    flags = ", ".join(dict.fromkeys(record["flags"] for record in there if record["flags"]))
    return Entry(
        value=mean, spread=spread, error=error, num_seeds=len(values), published=fact, note=note, flags=flags,
        partial=len(there) < len(asked),
    )  # fmt: skip


def _against(row: Row, base: Row | None) -> Row:
    """A row with its gaps to the base model; a value whose base value is missing is not shown.

    A task that the base model was not asked for, since it says nothing of it (attribution), has no gap.
    """
    entries = {}
    for column, entry in row.entries.items():
        reference = None if base is None or column not in base.entries else base.entries[column].value
        if entry.value is None or (base is not None and column not in base.entries):
            entries[column] = entry
        elif reference is None:
            note = "measured, but not shown until its base model is"
            entries[column] = Entry(published=entry.published, note=note)
        else:
            kept = 100 * entry.value / reference if reference and column.higher_is_better and column.is_quality else None
            entries[column] = replace(entry, gap=entry.value - reference, kept=kept)
    return replace(row, entries=entries)


def _mark_best(rows: list[Row], base: str, columns: Sequence[Column]) -> list[Row]:
    """Mark the best cell of a base model in each column where it beats every other by more than chance."""
    for column in (column for column in columns if column.is_quality):
        ranked = ranking([row for row in rows if row.base_setting == base and not row.is_base], column)
        found = [difference(row.samples[column], ranked[0].samples[column], column) for row in ranked[1:]]
        if found and all(each is not None and each.real for each in found):
            best = ranked[0]
            marked = replace(best, entries={**best.entries, column: replace(best.entries[column], best=True)})
            rows = [marked if row is best else row for row in rows]
    return rows


def ranking(rows: Iterable[Row], column: Column) -> list[Row]:
    """The rows that have a value in a column, best first; equal ones in their order."""
    sign = -1 if column.higher_is_better else 1
    there = [row for row in rows if column in row.entries and row.entries[column].value is not None]
    return sorted(there, key=lambda row: sign * (row.entries[column].value or 0.0))
