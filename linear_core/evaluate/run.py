"""One task in, its scores out: through lm-eval, or our own windows of held-out text. Importing this imports no torch.

from linear_core.evaluate.run import evaluate_task
scores = evaluate_task(model, tokenizer, TaskSpec(name="mmlu", limit=200))
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import linear_core
from linear_core.evaluate.offline import data_source
from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.evaluate.tasks import TASKS, Task, check_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from linear_core.evaluate.windows import BaseOrReference

__all__ = ["check_task", "data_source", "evaluate_task", "harness_version"]
log = logging.getLogger(__name__)


def harness_version(task: TaskSpec) -> str:
    """What scores a task, with its version: part of a score's identity."""
    own = f"golinear {linear_core.__version__}"
    return own if TASKS[task.name].kind in ("own", "speed") else f"lm-eval {version('lm-eval')}"


def evaluate_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskSpec,
    *,
    base_model_or_reference: BaseOrReference = None,
    device: Any = None,
    batch_size: int | str = "auto",
    switches: dict[str, Any] | None = None,
) -> list[Score]:
    """Scores one task, every metric it has. What cannot be had comes back as a Score with the reason, not an error.

    model: plain or linearized, in eval mode; moved to ``device`` when one is given. base_model_or_reference: for
    ``agreement``, see ``windows.base_reference``; a linearized model needs neither. switches: forward switches of a
    linearized model, e.g. ``{"paths": "exact"}``. Raises ValueError for a task that is not allowed (``check_task``),
    an unreadable ``GOLINEAR_DATA`` or a damaged file of it.
    """
    check_task(task)
    known = TASKS[task.name]
    source, available, reason = data_source(task)
    missing = partial(_missing, task, source)
    if not available:
        return missing(reason)
    started = time.monotonic()
    from linear_core.evaluate.measures import DataError, score_harness, score_speed, score_windows

    if switches and not hasattr(model, "recipe"):
        raise ValueError(f"switches {sorted(switches)} need a linearized model, not {type(model).__name__}")
    if device is not None:
        model.to(device)
    try:
        if known.kind == "speed":
            results = score_speed(model, task)
        elif known.kind == "own":
            results = score_windows(model, tokenizer, task, base_model_or_reference, switches)
        else:
            results = score_harness(model, tokenizer, task, batch_size, switches)
    except DataError as error:
        return missing(str(error))
    seconds = time.monotonic() - started
    log.info("%s: %s in %.1f s", task.label, ", ".join(f"{r.metric} {r.value:.4g}" for r in results), seconds)
    return [
        Score(task=task, metric=r.metric, value=r.value, stderr=r.stderr, samples=r.samples, source=source,
              harness=harness_version(task), seconds=seconds, flags=flags(known, r), details=r.details)
        for r in results
    ]  # fmt: skip


def _missing(task: TaskSpec, source: str, reason: str) -> list[Score]:
    log.info("%s: not run: %s", task.label, reason)
    return [
        Score(task=task, metric=metric, reason=reason, source=source, harness=harness_version(task))
        for metric in TASKS[task.name].metrics
    ]


@dataclass(frozen=True)
class Measured:
    """One metric of a task before it becomes a Score; ``values``: one number an item, ordered as details["items"]."""

    metric: str
    value: float
    stderr: float | None
    samples: int
    values: Sequence[float]
    details: dict[str, Any]


def flags(task: Task, result: Measured) -> tuple[str, ...]:
    """What should make a reader doubt a number: ``chance-level``, ``constant``, ``all-zero``, ``non-finite``."""
    found = []
    values = set(result.values)
    if not math.isfinite(result.value):
        found.append("non-finite")
    if task.kind in ("own", "speed"):  # a base agrees with itself everywhere
        return tuple(found)
    if len(result.values) > 1 and values == {0.0}:
        found.append("all-zero")
    elif len(result.values) > 1 and len(values) == 1 and not (task.kind == "ruler" and values == {1.0}):
        found.append("constant")
    if len(set(result.details.get("predictions", ()))) == 1 and result.samples > 4:
        found.append("constant")
    main = result.metric in ("acc", "acc_norm") and task.chance is not None
    if main and abs(result.value - (task.chance or 0.0)) <= 2 * (result.stderr or 0.0):
        found.append("chance-level")
    return tuple(dict.fromkeys(found))
