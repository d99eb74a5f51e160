"""What the figures share: looks of settings, lines with intervals, legends, and the words for what is not there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linear_core import style
from sweeps.tables import Column, Entry, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG_RATIO = 20.0  # an axis whose values span more than this is logarithmic
LEGEND_ROW = 0.18  # inches


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure, or the reason why there is none (``figure`` None); ``lacks`` says what is not in it."""

    name: str
    title: str
    caption: str = ""
    figure: Figure | None = None
    lacks: tuple[str, ...] = ()


class Looks:
    """Colour and marker of every setting, the same in all figures of a study: colour by mechanism, marker by the rest."""

    def __init__(self, table: Table):
        rows = [row for row in table.rows if not row.is_base]
        mechanisms = list(dict.fromkeys(row.facts["mechanism"] for row in rows))
        rests = list(dict.fromkeys(_rest(row) for row in rows))
        self._of = {row.recipe: (style.colour(mechanisms.index(row.facts["mechanism"])), style.marker(rests.index(_rest(row))))
                    for row in rows}  # fmt: skip
        self._several = len({row.base for row in table.rows}) > 1

    def of(self, row: Row) -> tuple[str, str]:
        """(colour, marker); the base model is a black circle."""
        return (style.BASE_COLOUR, "o") if row.is_base else self._of[row.recipe]

    def name(self, row: Row) -> str:
        """The setting, with its base model where there are several."""
        return f"{row.base} {row.recipe}" if self._several else row.recipe


def _rest(row: Row) -> str:
    return row.recipe.removeprefix(row.facts["mechanism"]).strip()


def has(row: Row, column: Column) -> bool:
    return column in row.entries and row.entries[column].value is not None


def half(entry: Entry) -> float | None:
    """Half of the 95 % interval of an entry, None when its error is not known."""
    return None if entry.error is None else 1.96 * entry.error


def line(axis: Any, points: Sequence[tuple[float, Entry | None]], look: tuple[str, str], label: str) -> None:
    """Points that have a value, joined, with their intervals."""
    there = [(x, e.value, half(e) or 0.0) for x, e in points if e is not None and e.value is not None]
    if there:
        xs, ys, halves = zip(*there)
        axis.errorbar(xs, ys, yerr=halves, color=look[0], marker=look[1], capsize=2, elinewidth=0.8, label=label)


def quality(row: Row, columns: Sequence[Column]) -> float | None:
    """Mean share of the base kept over these columns, in per cent; None when one is missing. The base: 100."""
    if row.is_base:
        return 100.0 if columns and all(has(row, column) for column in columns) else None
    kept = [row.entries[column].kept if column in row.entries else None for column in columns]
    there = [value for value in kept if value is not None]
    return math.fsum(there) / len(there) if there and len(there) == len(kept) else None


def frontier(points: Sequence[tuple[float, float]], more_is_better: bool) -> list[tuple[float, float]]:
    """Points that no other beats in cost and quality, by cost."""
    best, found = -math.inf, []
    for x, y in sorted(points, key=lambda p: ((-p[0] if more_is_better else p[0]), -p[1])):
        if y > best:
            best = y
            found.append((x, y))
    return found


def missing(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """How many scores of these rows are missing or partial, by reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for column in columns:
            entry = row.entries.get(column)
            if entry is not None and (entry.value is None or entry.partial):
                found.setdefault(("partial" if entry.partial else "missing", entry.note), []).append(f"{row.recipe}, {column.title}")
    return [
        f"{places[0]} is {word} ({why})" if len(places) == 1 else f"{len(places)} scores are {word} ({why})"
        for (word, why), places in found.items()
    ]


def cut(everything: Sequence[Any], shown: Sequence[Any], what: str) -> list[str]:
    """Says how many are left out, [] when none is."""
    left = len(everything) - len(shown)
    return [f"{left} more {what}"] if left > 0 else []


def drop(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.remove()


def maybe_log(axis: Any, values: Sequence[float | None]) -> None:
    """A logarithmic x axis, in plain numbers, where the values span orders of magnitude."""
    if spans_orders([value for value in values if value is not None]):
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(short)
        axis.minorticks_off()


def spans_orders(values: Sequence[float]) -> bool:
    """Whether values are positive and too far apart for a linear axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > LOG_RATIO


def legend(figure: Any, *axes: Any) -> None:
    """The labels of these axes, each once, below the figure, which grows by what they take."""
    once: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        once = dict(zip(labels, handles)) | once
    if once:
        columns = min(len(once), max(1, min(4, 110 // (max(map(len, once)) + 6))))
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=columns)
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(once) / columns))


def short(value: float, _: Any = None) -> str:
    """``1.5M``, ``20k``, ``8``."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:g}"


