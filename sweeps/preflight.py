"""Before cells are trained: does our code give a known base model its published scores? Imports no torch.

A base model whose full score is far from the published one says that prompts, tokens or weights are not what they are
taken for (a BOS twice, a cut prompt): every cell measured against it would be wrong, after hours of training.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import sqlalchemy as sa

from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.evaluate.tasks import TASKS
from sweeps import published, schema

if TYPE_CHECKING:
    from sweeps.cell import Cell
    from sweeps.store import Store
    from sweeps.sweep import Sweep

# Points between two runs of a full task: precision and versions move LAMBADA and MMLU by tenths; RULER's 500 samples
# are drawn anew and have a standard error of about two.
TOLERANCE, RULER_TOLERANCE = 1.0, 5.0


def why_off(base: str, task: TaskSpec, metric: str, value: float, source: str = "") -> str:
    """Why a base model's score (0 … 1) is not the published one within tolerance; "" when it is, or none is known.

    Only full tasks in their own form are compared, and none that was made from another haystack than the usual one.
    """
    known = published.base_value(base, task, metric)
    if known is None or "ruler_essays_pd" in source:
        return ""
    allowed = RULER_TOLERANCE if TASKS[task.name].kind == "ruler" else TOLERANCE
    if abs(100 * value - known) <= allowed:
        return ""
    return f"{base} has {100 * value:.2f} on {task.label}, published is {known:.2f} ({published.SOURCE}), allowed ± {allowed:g}"


def flagged(cell: Cell, score: Score) -> Score:
    """A base model's score with the flag ``not as published`` when it is not; other scores as they are."""
    if not cell.is_base or score.value is None:
        return score
    off = why_off(cell.base, score.task, score.metric, score.value, score.source)
    return dataclasses.replace(score, flags=(*score.flags, "not as published")) if off else score


def doubts(store: Store, sweep: Sweep) -> dict[str, str]:
    """Base models of a pinned sweep with a stored score that is not as published, and which: their cells are refused."""
    asked = {
        key: (cell.base, task, sweep.source_of(task).source)
        for cell in sweep.cells if cell.is_base
        for task, key in sweep.score_keys(cell) if published.base_value(cell.base, task, TASKS[task.name].metrics[0])
    }  # fmt: skip
    if not asked:
        return {}
    table = schema.scores.c
    found: dict[str, str] = {}
    query = sa.select(table.score_key, table.metric, table.value).where(
        table.score_key.in_(list(asked)), table.value.is_not(None)
    )
    for row in store.read(query):
        base, task, source = asked[row.score_key]
        if off := why_off(base, task, row.metric, row.value, source):
            found.setdefault(base, f"{off}; look at prompts, weights and precision, or start with accept_base_scores")
    return found
