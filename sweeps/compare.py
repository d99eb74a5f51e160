"""Whether two settings differ in a column by more than chance: paired items where the store has them, seeds, errors.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import Score
from linear_core.evaluate.statistics import Comparison, compare_repeats
from sweeps import items

if TYPE_CHECKING:
    from sweeps.tables import Column

Record = Mapping[str, Any]
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Difference:
    """``second − first`` in a column's unit (points for shares), its 95 % interval and p; None: nothing to judge it by."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    method: str = ""
    seeds: int = 1  # on the side with fewer; a base model has no chance in its training and does not count

    @property
    def real(self) -> bool:
        """Whether chance alone would do this less than once in twenty times."""
        return self.p is not None and self.p < LEVEL


def difference(first: Sequence[Record], second: Sequence[Record], column: Column) -> Difference | None:
    """Two settings' rows of one column (a row a seed); None when either has no value.

    By paired items when both have them and they are the same, else by their standard errors, unpaired.
    """
    a, b = ([row for row in rows if row["status"] == "measured"] for rows in (first, second))
    if not a or not b:
        return None
    value = column.scale * (_mean(b) - _mean(a))
    seeds = min([len(rows) for rows in (a, b) if not rows[0]["is_base"]] or [1])
    if len({row["items"] for row in (*a, *b)}) == 1 and all(row["values"] for row in (*a, *b)):
        found = compare_repeats(*([items.unpack(row["values"]).tolist() for row in rows] for rows in (a, b)))
        return _from_items(value, found, seeds)
    return _from_errors(value, a, b, column, seeds)


def of_cells(
    first: Iterable[tuple[str, str, Score]], second: Iterable[tuple[str, str, Score]]
) -> Iterator[tuple[Column, float, float, Difference]]:
    """(column, first's value, second's, difference) of every score that both cells have, from ``queries.scores_of``."""
    from sweeps.tables import Column

    def by_measure(found: Iterable[tuple[str, str, Score]]) -> dict[Any, Score]:
        return {(s.task, s.metric, s.source, s.harness): s for _, _, s in found if s.value is not None}

    ours, theirs = by_measure(first), by_measure(second)
    for key, score in ours.items():
        if (other := theirs.get(key)) is not None:
            column = Column(spec=score.task, metric=score.metric)
            rows = [
                {"status": "measured", "value": s.value, "stderr": s.stderr, "is_base": False, **items.of(s)}
                for s in (score, other)
            ]
            found = difference(rows[:1], rows[1:], column)
            if found is not None:
                yield column, rows[0]["value"], rows[1]["value"], found


def _mean(rows: Sequence[Record]) -> float:
    return math.fsum(row["value"] for row in rows) / len(rows)


def _from_items(value: float, found: Comparison, seeds: int) -> Difference:
    """The items' own scale (losses for a perplexity) is carried over to the column's, so that z is the same."""
    if not math.isfinite(found.low) or not found.difference:
        half = 0.0 if found.method == "no spread" else None
        low, high = (None, None) if half is None else (value, value)
        return Difference(value=value, low=low, high=high, p=found.p, method=found.method, seeds=seeds)
    half = abs(value / found.difference) * (found.high - found.low) / 2
    return Difference(value=value, low=value - half, high=value + half, p=found.p, method=found.method, seeds=seeds)


def _from_errors(value: float, a: Sequence[Record], b: Sequence[Record], column: Column, seeds: int) -> Difference:
    errors = [standard_error([row["value"] for row in rows], rows[0]["stderr"]) for rows in (a, b)]
    if errors[0] is None or errors[1] is None:
        return Difference(value=value, method="no errors known", seeds=seeds)
    error = column.scale * math.hypot(*(e or 0.0 for e in errors))
    p = math.erfc(abs(value) / error / math.sqrt(2)) if error else float(value == 0)
    half = 1.96 * error
    return Difference(
        value=value, low=value - half, high=value + half, p=p, method="standard errors, not paired", seeds=seeds
    )


def standard_error(values: Sequence[float], of_items: float | None) -> float | None:
    """Of a mean over seeds by their spread; of a single one by its items' error (None when that is not known)."""
    if len(values) == 1:
        return of_items
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(spread / len(values))
