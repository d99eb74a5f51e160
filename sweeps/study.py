"""All that is known of a sweep as one value: from the store, or from a file of ``golinear table --format json``.

The file needs neither store nor weights nor this machine: tables, figures and the report are rebuilt from it,
identical. One line a cell, score and curve, so that it can be kept under version control. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from sweeps import queries, render, tables
from sweeps.store import Store
from sweeps.sweep import Sweep

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "golinear study 1"
CURVE_POINTS = 128
CURVE_NAMES = ("tokens_seen", "loss", "learning_rate", "grad_norm", "tokens_per_second")
SCORE_COLUMNS = ("task", "task_name", "length", "limit", "shots", "task_seed", "metric", "value", "status", "reason",
                 "source", "harness", "stderr", "samples", "flags", "eval_seconds", "items", "values")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Study:
    """A sweep's tidy frame (``tables.frame``) and what stands beside it.

    failures: one dict a failed cell (key, label, state, cause, reason). curves: by key, columns of at most 128 points.
    versions: of packages, by environment. maps: by key, attention errors by layer and token (the task diagnostics).
    """

    name: str
    data: pd.DataFrame
    sweeps: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    failures: tuple[Mapping[str, Any], ...] = ()
    curves: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    maps: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    made: str = ""  # version of golinear that wrote it

    def table(self, *, all_metrics: bool = False) -> tables.Table:
        """Summary of the frame (``tables.summary``), made once."""
        return self._all_metrics if all_metrics else self._main_metrics

    @cached_property
    def _main_metrics(self) -> tables.Table:
        return tables.summary(self.data, title=self.name)

    @cached_property
    def _all_metrics(self) -> tables.Table:
        return tables.summary(self.data, title=self.name, all_metrics=True)

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """One dict a cell: the frame's columns that are the same for all its scores."""
        return list({row["key"]: _without(row, SCORE_COLUMNS) for row in tables.records(self.data)}.values())


def from_store(store: Store, sweep_id: str | None = None) -> Study:
    """The study of a sweep by id or name; None: the newest. Raises ValueError as ``queries.load_sweep`` does."""
    found, sweep = queries.load_sweep(store, sweep_id)
    return of_sweep(store, sweep, found)


def of_sweep(store: Store, sweep: Sweep, sweep_id: str = "") -> Study:
    """The study of a pinned sweep, from its published results, scores, failures and curves."""
    import linear_core

    labels = {cell.train_key: cell.label for cell in sweep.cells}
    origin = {key: found for key, found in queries.provenance_of(store).items() if key in labels}
    failures = tuple(
        {"key": f.key, "label": labels[f.key], "state": f.state, "cause": f.cause, "reason": f.reason}
        for f in sorted(queries.failures(store), key=lambda f: list(labels).index(f.key) if f.key in labels else -1)
        if f.key in labels
    )
    return Study(
        name=sweep.name, sweeps=(sweep_id,) if sweep_id else (), data=tables.frame(store, sweep),
        left_out=sweep.left_out, failures=failures,
        curves={key: curve for key in labels if key in origin and (curve := _curve(store, key))},
        versions=_versions(origin.values()), made=linear_core.__version__,
        maps={key: score.details["map"] for key, _, score in queries.scores_of(store, list(labels)) if "map" in score.details},
    )  # fmt: skip


def join(studies: Sequence[Study]) -> Study:
    """Several studies as one; a score that stands in two is kept once. Raises ValueError for none."""
    if not studies:
        raise ValueError("no studies to join")
    if len(studies) == 1:
        return studies[0]
    data = tables.concat(study.data for study in studies)
    done = set(data[data["status"] == tables.MEASURED]["key"])
    failures = {f["key"]: f for study in studies for f in study.failures if f["key"] not in done}
    return Study(
        name=" + ".join(dict.fromkeys(study.name for study in studies)), data=data,
        sweeps=tuple(dict.fromkeys(name for study in studies for name in study.sweeps)),
        left_out=tuple(dict.fromkeys(pair for study in studies for pair in study.left_out)),
        failures=tuple(failures.values()),
        curves={key: curve for study in studies for key, curve in study.curves.items()},
        versions={key: found for study in studies for key, found in study.versions.items()},
        maps={key: found for study in studies for key, found in study.maps.items()},
        made=", ".join(dict.fromkeys(study.made for study in studies)),
    )  # fmt: skip


def to_json(study: Study) -> str:
    """The summary (title, columns, rows) for a reader, and everything else for ``from_json``."""
    made = json.loads(render.render(study.table(), "json"))
    wanted = ("key", *SCORE_COLUMNS)
    scores = [{name: row[name] for name in wanted if name in row} for row in tables.records(study.data)]
    parts = {"format": FORMAT, "made": study.made, **made, "name": study.name, "sweeps": study.sweeps,
             "left_out": study.left_out, "failures": study.failures, "versions": study.versions,
             "cells": study.cells, "scores": [_without(row, (), empty=True) for row in scores],
             "curves": [{"key": key, **curve} for key, curve in study.curves.items()],
             "maps": [{"key": key, **found} for key, found in study.maps.items()]}  # fmt: skip
    return "{\n" + ",\n".join(f"{_dumps(name)}: {_lines(value)}" for name, value in parts.items()) + "\n}\n"


def from_json(text: str, name: str = "the file") -> Study:
    """The study that ``to_json`` wrote. Raises ValueError for anything else, saying what is wrong."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error}); allowed: what golinear table SWEEP --format json wrote") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        said = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{name} is not a study: its format is {said!r}; allowed: {FORMAT!r}, of golinear table --format json")
    cells = {cell["key"]: cell | {k: v for k, v in _unsaid(cell).items() if k not in cell} for cell in found["cells"]}
    blank = dict.fromkeys(SCORE_COLUMNS)
    texts = dict.fromkeys(("reason", "flags", "source", "harness"), "")
    rows = [{**cells[row["key"]], **blank, **texts, **row} for row in found["scores"]]
    curves = {curve["key"]: _without(curve, ("key",)) for curve in found["curves"]}
    return Study(
        name=found["name"], data=tables.from_records(rows), sweeps=tuple(found["sweeps"]), curves=curves,
        left_out=tuple((a, b) for a, b in found["left_out"]), failures=tuple(found["failures"]),
        versions=found["versions"], made=found["made"],
        maps={each["key"]: _without(each, ("key",)) for each in found.get("maps", [])},
    )  # fmt: skip


def _unsaid(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What an older version's file does not say of a cell: settings that it did not have are at their defaults."""
    from linear_core.models import REGISTRY

    base = cell["base"]
    fields = (*dataclasses.fields(Recipe), *dataclasses.fields(TrainSettings))
    defaults = {field.name: None if cell["is_base"] else field.default for field in fields}
    return {"base_parameters": REGISTRY[base].shape.num_parameters if base in REGISTRY else 0, **defaults}


def read(paths: Iterable[Path]) -> Study:
    """The studies in these files, joined. Raises ValueError naming a file that is missing or no study."""
    studies = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file; give what golinear table SWEEP --format json wrote")
        studies.append(from_json(path.read_text(encoding="utf-8"), str(path)))
    return join(studies)


def _curve(store: Store, key: str) -> dict[str, list[float]]:
    """A published cell's training curve in at most ``CURVE_POINTS`` means; empty when its files are gone."""
    try:
        path = store.published_folder(key) / "curve.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, KeyError, json.JSONDecodeError):
        return {}
    points = min(CURVE_POINTS, len(rows))
    parts = [rows[len(rows) * i // points : len(rows) * (i + 1) // points] for i in range(points)]
    names = [name for name in CURVE_NAMES if all(isinstance(row.get(name), int | float) for row in rows)]
    curve = {name: [_rounded(math.fsum(row[name] for row in part) / len(part)) for part in parts] for name in names}
    if "tokens_seen" not in curve:
        return {}
    return {**curve, "tokens_seen": [part[-1]["tokens_seen"] for part in parts]}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _versions(origin: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    return {found["environment"]: found["versions"] for found in origin if found.get("environment")}


def _without(row: Mapping[str, Any], names: Sequence[str], *, empty: bool = False) -> dict[str, Any]:
    """A copy without these names (and, with ``empty``, without what is None or "")."""
    return {k: v for k, v in row.items() if k not in names and not (empty and (v is None or v == ""))}


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _lines(value: Any) -> str:
    """A list or dict with one element a line; everything else on one line."""
    if isinstance(value, (list, tuple)) and value:
        return "[\n" + ",\n".join(map(_dumps, value)) + "\n]"
    if isinstance(value, Mapping) and value:
        return "{\n" + ",\n".join(f"{_dumps(name)}: {_dumps(inner)}" for name, inner in value.items()) + "\n}"
    return _dumps(value)
