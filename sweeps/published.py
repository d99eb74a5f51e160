"""The published numbers (package data) as facts to stand beside ours. Imports neither torch nor pandas."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

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


def value_of(cell: Mapping[str, Any] | Any, column: Column) -> float | None:
    """The published value of a frame's row in a column, in per cent; None unless every setting is the published one."""
    from linear_core.evaluate.tasks import TASKS

    from linear_core.models import REGISTRY

    task = TASKS.get(cell["task_name"])
    model = REGISTRY.get(cell["base"])
    if task is None or not task.published or model is None or not model.published or column.metric != task.metrics[0]:
        return None
    plain = (
        cell["softmax_layers"] == "none"
        and cell["gate_bias"] == 1.0
        and not cell["learned_read_scale"]
        and cell["merge"] != "mass"
    )
    if not plain or (cell["limit"] == cell["limit"] and cell["limit"] is not None):
        return None
    name = (
        task.published
        if not cell["length"] or cell["length"] != cell["length"]
        else f"{task.published}_{int(cell['length'])}"
    )
    budget = ("", "") if cell["is_base"] else (str(cell["window"]), str(cell["sinks"]))
    return _facts().get((model.published, cell["mechanism"], *budget, cell["adaptation"], name))
