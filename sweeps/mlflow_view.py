"""What MLflow shows of a sweep without set-up: names of parameters and metrics, a saved view, links. Imports no mlflow.

Parameters are sorted by name in MLflow, and its compare page starts with the first three that differ: so the axes have plain
names, and what is seldom varied stands behind ``recipe.`` and ``train.``. Charts are grouped by what stands before the last
slash of a metric: ``eval/``, ``gap/``, ``train/``, ``cost/``. A metric at step 0 is drawn as bars, others as lines: so only the
training curve has steps, the tokens seen.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from linear_core.evaluate.scores import Score
from sweeps import cost
from sweeps.cell import Cell

if TYPE_CHECKING:
    from sweeps.sweep import Sweep

AXES = ("mechanism", "budget", "adaptation", "merge", "softmax_layers")
CACHE_LENGTH = 32768
NO_CURVE = ("tokens_seen", "step", "done", "total", "cell")  # counters of a progress row
MAX_COMPARED = 100  # runs in one link: an address has a length
MAX_VIEWS = 20
MAX_VIEW = 5000  # characters of an experiment's tag
MARK = "golinear-parallel"  # in every view that is made here
SHARED_VIEW = "mlflow.sharedViewState."  # tags in which MLflow keeps the entries of its menu "Views"
MENUS = "workflowType=machine_learning"  # the same for an address
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the pages for training, not those for prompts


def cell_params(cell: Cell) -> dict[str, Any]:
    """Every axis of a cell as a flat parameter, in words that read well beside each other."""
    recipe = cell.recipe
    params: dict[str, Any] = {"base": cell.base_label, "revision": cell.revision, "seed": cell.seed}
    if cell.train is None:
        return params | {"recipe": "base", "mechanism": "softmax", "budget": "all", "adaptation": "none"}
    known = recipe.to_dict() | {"budget": recipe.budget}
    params |= {"recipe": recipe.name, **{axis: known.pop(axis) for axis in AXES}}
    params |= {"tokens": cell.train.tokens, "text": cell.data}
    train = cell.train.to_dict() | {"learning_rate": cell.train.peak_learning_rate(recipe.adaptation)}
    del train["tokens"], known["window"], known["sinks"]
    return params | {f"recipe.{k}": v for k, v in known.items()} | {f"train.{k}": v for k, v in train.items()}


def sweep_params(sweep: Sweep) -> dict[str, Any]:
    """What a sweep asked for, for its own run."""
    trained = [cell for cell in sweep.cells if cell.train is not None]
    listed: dict[str, list[Any]] = {
        "base": [cell.base_label for cell in sweep.cells],
        "recipes": [cell.recipe.name for cell in trained],
        "seeds": [cell.seed for cell in trained],
        "tokens": [cell.train.tokens for cell in trained if cell.train],
        "tasks": [task.label for task in sweep.tasks],
    }
    return {"cells": len(sweep.cells), **{k: ", ".join(map(str, dict.fromkeys(v))) for k, v in listed.items() if v}}


def cell_costs(cell: Cell) -> dict[str, float]:
    """``cost/…`` of a cell before it runs: bytes of its decode cache and number of new parameters."""
    from linear_core.models import resolve

    shape = resolve(cell.base).shape
    found = {"cost/cache_mib_at_32k": cost.cache_bytes(shape, cell.recipe, CACHE_LENGTH) / 2**20}
    return found if cell.is_base else found | {"cost/new_parameters": float(cost.new_parameters(shape, cell.recipe))}


def score_metrics(scores: Iterable[Score], base: Iterable[Score] = ()) -> dict[str, float]:
    """``eval/<task>`` of each task's main metric, ``eval/<task> <metric>`` of the others, and ``gap/…``: the value minus
    the base model's of the same task and data, where ``base`` has it."""
    before = {(s.task, s.metric, s.source): s.value for s in base if is_number(s.value)}
    found: dict[str, float] = {}
    for score in scores:
        if score.value is None or not is_number(score.value):
            continue
        name = score_name(score)
        found[f"eval/{name}"] = float(score.value)
        reference = before.get((score.task, score.metric, score.source))
        if reference is not None:
            found[f"gap/{name}"] = float(score.value) - reference
    return found


def score_name(score: Score) -> str:
    return _named(score.task.label, score.task.name, score.metric)


def _named(label: str, task: str, metric: str) -> str:
    from sweeps.tables import main_metric

    name = metric_name(label)
    return name if metric == main_metric(task) else f"{name} {metric_name(metric)}"


def metric_name(name: str) -> str:
    """A name that MLflow takes, one to one with ``plain_name``: ``@`` reads `` at ``, other characters outside
    ``[A-Za-z0-9_./-]`` are written in hex: ``niah_single_1@512`` → ``niah_single_1 at 512``, ``acc,none`` →
    ``acc:2c:none``."""
    spelled = re.sub(r"[^A-Za-z0-9_./@-]", lambda match: f":{match[0].encode().hex()}:", name)
    return spelled.replace("@", " at ")


def plain_name(name: str) -> str:
    """The inverse of ``metric_name``."""
    return re.sub(r":([0-9a-f]+):", lambda match: bytes.fromhex(match[1]).decode(), name.replace(" at ", "@"))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def member_tag(sweep_id: str) -> str:
    """The tag that a cell's run carries for every sweep it belongs to: sweeps share cells."""
    return f"sweep.{sweep_id}"


def saved_view(name: str, sweep_id: str, sweep: Sweep, made_at: float) -> str:
    """An entry of MLflow's menu "Views": the sweep's cells as a table of axes and scores, the best of the first task on top,
    and as charts, parallel coordinates first. Tasks that do not fit into a tag are left out.

    Ordered by start time MLflow would fold the cells away below their sweeps.
    """
    from sweeps.sweep import applies
    from sweeps.tables import HIGHER, main_metric

    best_up = not sweep.tasks or main_metric(sweep.tasks[0].name) not in HIGHER
    measured = [metric_name(task.label) for task in sweep.tasks if all(applies(task, cell) for cell in sweep.cells)]
    trained = [cell_params(cell) for cell in sweep.cells if not cell.is_base]
    varied = [axis for axis in ("base", *AXES, "seed") if len({params[axis] for params in trained}) > 1] or ["recipe"]
    while len(text := _view(name, sweep_id, varied, measured, best_up, made_at)) > MAX_VIEW and measured:
        measured.pop()
    return text


def outdated(tags: Mapping[str, str]) -> list[str]:
    """Names of an experiment's tags with views of sweeps (not those that people saved) beyond the newest MAX_VIEWS."""
    own = {
        name: json.loads(text)["createdAt"]
        for name, text in tags.items()
        if name.startswith(SHARED_VIEW) and MARK in text
    }
    return sorted(own, key=lambda name: -own[name])[MAX_VIEWS:]


def _view(name: str, sweep_id: str, axes: Sequence[str], measured: Sequence[str], best_up: bool, made_at: float) -> str:
    card = {
        "uuid": MARK, "type": "PARALLEL", "metricSectionId": "golinear", "isGenerated": False,
        "deleted": False, "showAllRuns": True, "selectedParams": axes, "selectedMetrics": [f"eval/{m}" for m in measured[:3]],
        "displayName": "axes and scores",
    }  # fmt: skip
    columns = [f"params.`{axis}`" for axis in dict.fromkeys(("recipe", *axes))]
    columns += [f"metrics.`{kind}/{task}`" for task in measured for kind in ("eval", "gap")]
    state = {
        "searchFilter": f"tags.`{member_tag(sweep_id)}` = 'yes'", "orderByAsc": best_up,
        "orderByKey": f"metrics.`eval/{measured[0]}`" if measured else "params.`recipe`",
        "startTime": "ALL", "lifecycleFilter": "Active", "datasetsFilter": [], "modelVersionFilter": "All Runs",
        "selectedColumns": [*columns, "metrics.`train/loss`"], "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": [card], "compareRunSections": [
            {"uuid": "golinear", "name": "axes", "display": True, "isReordered": False, "columns": 1, "cardHeight": 420}],
    }  # fmt: skip
    at = round(made_at * 1000)
    return json.dumps({"name": name, "createdAt": at, "updatedAt": at, "state": json.dumps(state)})


def links(experiment_id: str, sweep_id: str, runs: Sequence[str]) -> str:
    """A line of Markdown for a run's note: the cells as table, as charts, and all of them compared."""
    view = f"#/experiments/{experiment_id}/runs?{MENUS}&viewStateShareKey={quote(sweep_id)}"
    some = list(runs)[:MAX_COMPARED]
    # the page wants ``runs`` first
    compared = f"#/compare-runs?runs={quote(json.dumps(some))}&experiments={quote(json.dumps([experiment_id]))}&{MENUS}"
    found = [f"[cells]({view})", f"[charts]({view}&compareRunsMode=CHART)"]
    return " · ".join([*found, f"[compare {len(some)} cells]({compared})"] if len(some) > 1 else found)
