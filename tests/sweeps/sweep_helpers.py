"""Sweeps that are pinned without weights, text or network, and results for them."""

from __future__ import annotations

import dataclasses

from linear_core.evaluate.scores import Score, TaskSpec
from sweeps.cell import Cell
from sweeps.store import Store, new_holder
from sweeps.sweep import Sweep, TaskSource


def pinned(sweep: Sweep, *, data: str = "text1", reasons: dict[str, str] | None = None) -> Sweep:
    """The sweep with made-up weights, text and task sources."""
    cells = tuple(dataclasses.replace(cell, revision="rev1", data="" if cell.is_base else data) for cell in sweep.cells)
    sources = tuple(
        TaskSource(source="local", harness="lm-eval 0", reason=(reasons or {}).get(task.name, ""))
        for task in sweep.tasks
    )
    return dataclasses.replace(sweep, cells=cells, task_sources=sources)


def finish(store: Store, sweep: Sweep, cell: Cell, values: dict[str, float | None], **provenance: object) -> None:
    """Publish a cell with ``acc`` scores by task name; a task that is not named stays unmeasured."""
    claim = store.claim(cell.train_key, new_holder())
    assert claim is not None
    (store.folder(claim) / "curve.jsonl").write_text("{}")
    if not cell.is_base:
        store.publish(claim, cell, {"train_seconds": 60.0, **provenance})
    for task, score_key in sweep.score_keys(cell):
        if task.name in values:
            store.put_scores(claim, score_key, [score(task, values[task.name])])
    store.finish(claim)


def score(task: TaskSpec, value: float | None, metric: str = "acc", stderr: float | None = 0.01) -> Score:
    reason = "" if value is not None else "its data is not here"
    return Score(task=task, metric=metric, value=value, stderr=stderr if value is not None else None, reason=reason)
