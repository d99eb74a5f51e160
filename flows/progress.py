"""What a running cell says, on its way to people (lines), MLflow (curve) and the store (how far its checkpoint is)."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from linear_core.evaluate.scores import Score
from sweeps.cell import Cell
from sweeps.commands.console import LINE_SECONDS, line
from sweeps.pruning import Divergence
from sweeps.store import Claim, Store
from sweeps.tracking import Tracker

log = logging.getLogger(__name__)
Say = Callable[[str], None]


class Progress:
    """Called with what a worker's ``progress()`` gave. A line comes at most every 10 s: a log file stays readable."""

    def __init__(self, label: str, say: Say, tracker: Forgiving, store: Store, claim: Claim, run_id: str,
                 divergence: Divergence | None = None, *, machine: bool = True):  # fmt: skip
        self.label, self.say = label, say
        self.tracker, self.store, self.claim, self.run_id = tracker, store, claim, run_id
        self.divergence = divergence
        self.machine = machine  # whether its load goes to MLflow
        self._line_at = time.monotonic()
        self._checkpoint = self._samples = 0
        self._curve_from = 0  # tokens seen at the first row that this attempt logged

    def __call__(self, said: dict[str, Any]) -> None:
        if rows := said.get("rows"):
            self._curve_from = self._curve_from or rows[0]["tokens_seen"]
            self.tracker.log_curve(self.run_id, rows)
            if self.divergence:
                self.divergence.see(rows)
        if self.machine and (system := said.get("system")):
            self._samples += 1
            self.tracker.log_system(self.run_id, system, step=self._samples)
        if (saved := said.get("checkpoint_tokens") or 0) > self._checkpoint:
            self._checkpoint = saved
            self.store.note(self.claim, tokens=saved)
        if time.monotonic() - self._line_at > LINE_SECONDS and said.get("total"):
            self._line_at = time.monotonic()
            self.say(f"{self.label}: {line(said)}")

    @property
    def diverged(self) -> str:
        """Why the cell is to be ended early; "" when it is not, or nobody asked for that."""
        return self.divergence.reason if self.divergence else ""

    def trained(self, cell: Cell, provenance: dict[str, Any]) -> None:
        """The end of training, in a line and in MLflow."""
        self.tracker.log_trained(self.run_id, cell, provenance)
        self.tracker.log_curve(self.run_id, self._earlier_rows())
        loss = provenance["training"].get("loss")
        shown = "" if loss is None else f", loss {loss:.3f}"
        self.say(f"{self.label}: trained in {provenance['train_seconds']:.1f} s{shown}")

    def _earlier_rows(self) -> list[dict[str, Any]]:
        """Rows of the curve from attempts before this one, so that every finished run shows the whole curve."""
        path = self.store.folder(self.claim) / "curve.jsonl"
        if not path.exists():  # written on another node
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row for row in rows if not self._curve_from or row["tokens_seen"] < self._curve_from]

    def scored(self, scores: Iterable[Score]) -> None:
        """What came out, in a line."""
        shown = [f"{s.task.label} {s.metric} {s.value:.4g}" for s in scores if s.value is not None]
        self.say(f"{self.label}: {', '.join(shown) or 'nothing could be measured'}")


class Forgiving:
    """A tracker whose failures cost a warning, never a cell: what is true stands in the store, MLflow only shows it.

    A run that could not be ended stays RUNNING until the next sweep ends it as an orphan.
    """

    def __init__(self, tracker: Tracker):
        self._tracker = tracker

    def __getattr__(self, name: str) -> Any:
        wanted = getattr(self._tracker, name)
        return functools.partial(self._call, wanted) if callable(wanted) else wanted

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return method(*arguments, **named)
        except (MlflowException, OSError) as error:  # OSError: no connection, no space
            log.warning("MLflow: %s was not written: %s", method.__name__, error)
            return ""
