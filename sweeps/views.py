"""Views of a finished table as text: what stands in each place, for every format alike. Imports no torch.

``summary`` is the whole; the others show one side of it. ``VIEWS`` names them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from linear_core.evaluate.statistics import smallest_alpha, win_and_tie
from linear_core.evaluate.tasks import TASKS
from sweeps import published
from sweeps.tables import MEASURED, Column, Entry, Row, Table

DASH = "–"
TOLERANCES = (0, 1, 5)  # points below the base model that still count as a tie
FACTS = ("seeds", "new parameters", "cache at 32k", "tokens", "minutes")
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


class Best(str):
    """The text of a place that is the best of its column by more than chance."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Header, rows of text, footnotes. The first two columns are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


class Notes:
    """Footnotes as they come up: the same note has the same mark."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}

    def mark(self, note: str) -> str:
        """The superscript of a note, "" of none."""
        return self._marks.setdefault(note, str(len(self._marks) + 1).translate(SUPERSCRIPT)) if note else ""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([f"{mark} {note}" for note, mark in self._marks.items()])


def view(table: Table, name: str = "summary") -> Grid:
    """One of ``VIEWS`` of a table. Raises ValueError for another name, saying what is allowed."""
    if name not in VIEWS:
        raise ValueError(f"view {name!r} is not known; allowed: {', '.join(VIEWS)}")
    return VIEWS[name](table)


def _scores(table: Table, *, facts: bool = False) -> Grid:
    """Mean ± spread over seeds with its gap to the base model, the published value and what should be doubted."""
    notes = Notes()
    header = ["model", "recipe", *map(column_text, table.columns), *(_fact_names(table) if facts else ())]
    body = [
        (row.base, row.recipe, *(_shown(row.entries.get(c), notes) for c in table.columns), *(_facts(row) if facts else ()))
        for row in table.rows
    ]
    return _grid(table, header, body, [*notes, *map(source_text, table.columns)])


def _summary(table: Table) -> Grid:
    return _scores(table, facts=True)


def _gaps(table: Table) -> Grid:
    """Distance to the base model in points and in per cent of its value."""
    return _entries(table, lambda entry, column: _gap(entry))


def _gap(entry: Entry) -> str:
    if entry.gap is None or entry.value is None:
        return ""
    base = entry.value - entry.gap
    return signed(entry.gap) + (f" ({signed(100 * entry.gap / base, 1)} %)" if base else "")


def _kept(table: Table) -> Grid:
    """Per cent of the base model's value that is kept, and the mean over all columns that have one."""
    made = _entries(table, lambda entry, column: "" if entry.kept is None else f"{entry.kept:.1f} %")
    shown = [i for i, column in enumerate(table.columns) if column.higher_is_better and column.is_quality]
    body = []
    for row, texts in zip(table.rows, made.body):
        kept = [row.entries[c].kept for c in (table.columns[i] for i in shown) if c in row.entries]
        there = [value for value in kept if value is not None]
        whole = len(there) == len(shown) and bool(there)
        mean = f"{math.fsum(there) / len(there):.1f} %" if whole else (DASH if not row.is_base else "")
        body.append((*texts[:2], *(texts[2 + i] for i in shown), mean))
    header = (*made.header[:2], *(made.header[2 + i] for i in shown), "mean kept")
    if not shown:
        return Grid(title=made.title, header=header, body=(), notes=("no measure in per cent: nothing to keep a share of",))
    return Grid(title=made.title, header=header, body=tuple(body), notes=made.notes)


def _published(table: Table) -> Grid:
    """Ours, the published value and the difference, in every place that has a published value; then the peers' rows."""
    columns = [c for c in table.columns if any(e.published is not None for e in _column(table, c))]
    notes = Notes()
    body = []
    for row in table.rows:
        entries = [row.entries.get(column) for column in columns]
        if any(entry is not None and entry.published is not None for entry in entries):
            body.append((row.base, row.recipe, *(_beside(entry, notes) for entry in entries)))
    for base in dict.fromkeys(row.base for row in table.rows):
        for name, values in published.peers(base).items():
            wanted = [values.get(published.task_name(column.spec)) for column in columns]
            texts = ["" if value is None else number(value) for value in wanted]
            if any(texts):
                body.append((base, f"{name} (published)", *texts))
    said = [f"ours / paper (difference); published: {published.SOURCE}, per cent"] if body else []
    return _grid(table, ["model", "recipe", *map(column_text, columns)], body, [*notes, *said])


def _beside(entry: Entry | None, notes: Notes) -> str:
    if entry is None or entry.published is None:
        return ""
    if entry.value is None:
        return f"{DASH}{notes.mark(entry.note)} / {number(entry.published)}"
    return f"{number(entry.value)} / {number(entry.published)} ({signed(entry.value - entry.published)})"


def _wins(table: Table) -> Grid:
    """Over all tasks with an accuracy: share of those at or above the base model, within no, one and five points; and the
    tolerance at which it is half of them."""
    columns = [c for c in table.columns if c.scale == 100 and TASKS[c.spec.name].kind != "own"]
    body = []
    for row in table.rows:
        ours = {c.title: e.value for c in columns if (e := row.entries.get(c)) and e.value is not None and e.gap is not None}
        base = {c.title: ours[c.title] - (row.entries[c].gap or 0.0) for c in columns if c.title in ours}
        if row.is_base:
            continue
        shares = [f"{100 * win_and_tie(base, ours, alpha):.0f} %" if ours else DASH for alpha in TOLERANCES]
        half = number(smallest_alpha(base, ours)) if ours else DASH
        body.append((row.base, row.recipe, f"{len(ours)} of {len(columns)}", *shares, half))
    header = ["model", "recipe", "tasks", *(f"≥ base − {alpha:g}" for alpha in TOLERANCES), "half of them at α"]
    said = "win-and-tie rate with tolerance α in points, and the smallest α at which it is one half: arXiv 2603.15590"
    return _grid(table, header, body, [said])


def _seeds(table: Table) -> Grid:
    """Every seed's own value, one row a seed."""
    notes = Notes()
    body = []
    for row in table.rows:
        seeds = sorted({record["seed"] for records in row.samples.values() for record in records})
        for seed in seeds:
            texts = [_of_seed(row.samples.get(column, ()), seed, column, notes) for column in table.columns]
            body.append((row.base, row.recipe if row.is_base else f"{row.recipe} seed {seed}", *texts))
    return _grid(table, ["model", "recipe", *map(column_text, table.columns)], body, list(notes))


def _of_seed(records: Sequence[Mapping[str, Any]], seed: int, column: Column, notes: Notes) -> str:
    for record in records:
        if record["seed"] == seed:
            there = record["status"] == MEASURED
            return number(record["value"] * column.scale) if there else DASH + notes.mark(record["reason"])
    return ""


def _cost(table: Table) -> Grid:
    """What each row costs: seeds, new parameters, cache bytes, training tokens and time."""
    return _grid(table, ["model", "recipe", *_fact_names(table)], [(row.base, row.recipe, *_facts(row)) for row in table.rows])


def _entries(table: Table, text: Callable[[Entry, Column], str]) -> Grid:
    notes = Notes()

    def place(row: Row, column: Column) -> str:
        entry = row.entries.get(column)
        if entry is None:
            return ""
        shown = text(entry, column) if entry.value is not None else DASH
        return (Best(shown) if entry.best else shown) + notes.mark(entry.note)

    header = ["model", "recipe", *map(column_text, table.columns)]
    body = [(row.base, row.recipe, *(place(row, column) for column in table.columns)) for row in table.rows]
    return _grid(table, header, body, list(notes))


def _column(table: Table, column: Column) -> list[Entry]:
    return [row.entries[column] for row in table.rows if column in row.entries]


def _grid(table: Table, header: Sequence[str], body: Sequence[tuple[str, ...]], notes: Sequence[str] = ()) -> Grid:
    return Grid(title=table.title, header=tuple(header), body=tuple(body), notes=tuple(notes))


def column_text(column: Column) -> str:
    """A column's title with the direction that is better."""
    return f"{column.title} {'↑' if column.higher_is_better else '↓'}"


def source_text(column: Column) -> str:
    """Where a column's numbers come from, e.g. ``mmlu: acc of 14042 items; hub cais/mmlu; lm-eval 0.4.13``."""
    unit = "tokens" if column.spec.name in TASKS and TASKS[column.spec.name].kind == "own" else "items"
    items = "" if column.samples is None else f" of {column.samples:,} {unit}"
    return "; ".join([f"{column.title}: {column.metric}{items}", *filter(None, (column.source, column.harness))])


def _shown(entry: Entry | None, notes: Notes) -> str:
    text = entry_text(entry, notes)
    return Best(text) if entry is not None and entry.best else text


def entry_text(entry: Entry | None, notes: Notes) -> str:
    """``68.8 ± 0.3 (−6.0; paper 68.8)``; ``–`` with its footnote's mark when missing; empty when not asked for."""
    if entry is None:
        return ""
    mark = notes.mark(entry.note)
    if entry.value is None:
        return DASH + mark + (f" (paper {entry.published:.2f})" if entry.published is not None else "")
    text = number(entry.value) + ("" if entry.spread is None else f" ± {number(entry.spread)}")
    further = [] if entry.gap is None else [signed(entry.gap)]
    if entry.published is not None:
        further.append(f"paper {entry.published:.2f}, {signed(entry.value - entry.published)}")
    if entry.flags:
        further.append(entry.flags)
    if entry.partial:
        further.append(f"partial: {entry.num_seeds} seeds" if entry.num_seeds > 1 else "partial: 1 seed")
    return text + (f" ({'; '.join(further)})" if further else "") + mark


def number(value: float) -> str:
    """Two decimals; three digits of what is large, two of what is small."""
    size = abs(value)
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.2f}" if size >= 0.1 or size < 5e-5 else f"{value:.2g}"
    return text.replace("-", "−") if text.strip("-0.") else text.lstrip("-")


def signed(value: float, digits: int = 2) -> str:
    """With its sign, always: +1.20, −0.35; no decimals of what is large."""
    return (f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.{digits}f}").replace("-", "−")


def _fact_names(table: Table) -> tuple[str, ...]:
    """The facts' names; minutes are GPU-minutes where cells were trained on GPUs."""
    on_gpu = any(row.facts["gpus"] for row in table.rows)
    return (*FACTS[:-1], "GPU-minutes" if on_gpu else FACTS[-1])


def _facts(row: Row) -> list[str]:
    facts = row.facts
    cache, minutes = f"{facts['cache_bytes'] / 2**20:.1f} MiB", facts["minutes"]
    if row.is_base:
        return ["", "", cache, "", ""]
    spent = "" if minutes is None else f"{minutes * (facts['gpus'] or 1):.1f}"
    return [str(facts["seeds"]), f"{facts['new_parameters'] / 1e6:.2f}M", cache, f"{facts['tokens']:,}", spent]


VIEWS: dict[str, Callable[[Table], Grid]] = {
    "summary": _summary, "scores": _scores, "gaps": _gaps, "kept": _kept, "published": _published, "wins": _wins,
    "seeds": _seeds, "cost": _cost,
}  # fmt: skip
