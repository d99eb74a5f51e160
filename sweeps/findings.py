"""What a table says, in words computed from its numbers: who wins by how much, and whether that is more than chance.

Sentences may hold ``**strong**`` words. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from linear_core.settings import TrainSettings
from sweeps.compare import Difference, difference
from sweeps.tables import TRAIN_FIELDS, Column, Row, Table, ranking
from sweeps.views import number

AXES = ("mechanism", "budget", "adaptation", "merge", "softmax_layers", "gate_bias", "learned_read_scale", "lora_rank",
        "lora_alpha", "conv_kernel", "data", *TRAIN_FIELDS)  # fmt: skip
MOST_VALUES = 4  # of a choice that are all compared with one another; of more, each with the first


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One measure of one base model: its best setting against the next one and against the base model."""

    base: str
    column: Column
    best: Row
    value: float
    gap: Difference | None  # best − base model
    second: Row | None
    lead: Difference | None  # best − second
    behind: tuple[Row, ...]  # settings that are significantly worse than the best
    level: tuple[Row, ...]  # those that cannot be told from it
    tied: tuple[Row, ...] = ()  # those of them with the very same value

    @property
    def is_clear(self) -> bool:
        return bool(self.behind) and not self.level


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One choice changed and all else kept: the mean difference over pairs of settings, a measure each."""

    axis: str
    first: str
    second: str
    pairs: int
    means: dict[Column, float]
    better: dict[Column, int]  # pairs that are significantly better, and worse, with the second
    worse: dict[Column, int]


def measures(table: Table) -> list[Column]:
    """Columns of quality that base models were asked for as well: what a setting can win or lose."""
    return [c for c in table.columns if c.is_quality and any(c in row.entries for row in table.rows if row.is_base)]


def verdicts(table: Table) -> list[Verdict]:
    """A verdict for each base model and measure that has a value."""
    found = []
    for base in (row for row in table.rows if row.is_base):
        mine = [row for row in table.rows if not row.is_base and row.base_setting == base.setting]
        for column in measures(table):
            ranked = ranking(mine, column)
            if ranked:
                found.append(_verdict(base, column, ranked))
    return found


def _verdict(base: Row, column: Column, ranked: Sequence[Row]) -> Verdict:
    best = ranked[0]
    leads = {row.setting: difference(row.samples[column], best.samples[column], column) for row in ranked[1:]}
    behind = tuple(row for row in ranked[1:] if (d := leads[row.setting]) is not None and d.real)
    level = tuple(row for row in ranked[1:] if row not in behind)
    reference = base.samples.get(column, ())
    tied = tuple(row for row in level if row.entries[column].value == best.entries[column].value)
    return Verdict(
        tied=tied, base=base.base, column=column, best=best, value=best.entries[column].value or 0.0, behind=behind, level=level,
        gap=difference(reference, best.samples[column], column) if reference else None,
        second=ranked[1] if len(ranked) > 1 else None, lead=leads[ranked[1].setting] if len(ranked) > 1 else None,
    )  # fmt: skip


def headline(table: Table) -> list[str]:
    """The result in a sentence or two a base model."""
    said = []
    found = verdicts(table)
    for base in dict.fromkeys(row.base for row in table.rows if row.is_base):
        mine = [verdict for verdict in found if verdict.base == base]
        settings = [row for row in table.rows if row.base == base and not row.is_base]
        if not settings:
            said.append(f"**{base}**: only the unconverted model was asked for.")
        elif not mine:
            said.append(f"**{base}**: no setting has a score yet.")
        elif len(settings) == 1:
            said.append(f"{_alone(base, settings[0], mine)} {_kept(settings[0], table)}")
        else:
            text, winner = _winner(base, mine)
            said.append(f"{text} {_kept(next(row for row in settings if row.setting == winner), table)}")
    return said


def _alone(base: str, row: Row, found: Sequence[Verdict]) -> str:
    lost = sum(v.gap is not None and v.gap.real and _is_worse(v.gap.value, v.column) for v in found)
    return f"**{base}**: {row.recipe} is significantly worse than the base model on {lost or 'none'} of {_count(len(found), 'measure')}."


def _kept(row: Row, table: Table) -> str:
    """What a setting keeps of its base model, and what of the base model's cache it needs."""
    kept = [row.entries[c].kept for c in measures(table) if c in row.entries and c.higher_is_better]
    there = [value for value in kept if value is not None]
    base = next((r for r in table.rows if r.is_base and r.setting == row.base_setting), None)
    share = f"keeps {math.fsum(there) / len(there):.1f} % of the base model's scores on average and " if there else ""
    full = "" if base is None else f", the base model {base.facts['cache_bytes'] / 2**20:,.1f} MiB"
    return f"It {share}needs {row.facts['cache_bytes'] / 2**20:,.1f} MiB of cache after 32,768 tokens{full}."


def _winner(base: str, found: Sequence[Verdict]) -> tuple[str, str]:
    """(words, setting) of the one that is significantly behind the best least often."""
    names: dict[str, str] = {}
    unbeaten: Counter[str] = Counter()
    clear: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for verdict in found:
        for row in (verdict.best, *verdict.level):
            unbeaten[row.setting] += 1
            names[row.setting] = row.recipe
        first.update(row.setting for row in (verdict.best, *verdict.tied))
        clear[verdict.best.setting] += verdict.is_clear
    order = sorted(unbeaten, key=lambda setting: (-unbeaten[setting], -clear[setting], -first[setting]))
    top, many = order[0], len(found)
    text = f"**{base}**: **{names[top]}** has the best score on {first[top]} of {_count(many, 'measure')}"
    text += f", on {clear[top] or 'none'} of them significantly ahead of every other setting" if first[top] else ""
    behind = many - unbeaten[top]
    text += f"; it is significantly behind the best on {behind or 'none'}."
    if rivals := [names[s] for s in order[1:] if unbeaten[s] == unbeaten[top]]:
        text += f" As a whole these measurements do not tell it from {_listed(rivals)}."
    mine = [v for v in found if top in (row.setting for row in (v.best, *v.tied)) and v.gap is not None]
    worse = sum(v.gap is not None and v.gap.real and _is_worse(v.gap.value, v.column) for v in mine)
    if mine:
        text += f" Where it is best it is significantly worse than the base model on {worse or 'none'} of {len(mine)}."
    return text, top


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def sentence(verdict: Verdict) -> str:
    """One measure in words: ``gdn 56+8 is best at 27.50 %, ahead of gla 56+8 by 2.50 points (−1.20 to 6.20; p = 0.18, not
    significant); below the base model by 5.00 points (…).``"""
    v = verdict
    shown = number(v.value) + (" %" if v.column.scale == 100 else "")
    text = f"**{v.best.recipe}** {'is best at' if v.second else 'reaches'} {shown}"
    if v.tied:
        text = f"**{_listed([v.best.recipe, *(row.recipe for row in v.tied)])}** are level at {shown}"
        others = [row.recipe for row in v.level if row not in v.tied]
        text += f"; not told from {_listed(others)}" if others else ""
    elif v.second is not None and v.lead is not None:
        text += f", {_by(v.lead, v.column, 'ahead of', 'behind')} {v.second.recipe} {_amount(v.lead, v.column)}"
        others = [row.recipe for row in v.level if row is not v.second]
        text += f"; not told from {_listed(others)} either" if others else ""
    if v.gap is not None:
        text += f"; {_by(v.gap, v.column, 'better than', 'worse than')} the base model {_amount(v.gap, v.column)}"
    entry = v.best.entries[v.column]
    return text + (f"; doubtful: {entry.flags}" if entry.flags else "") + "."


def _by(found: Difference, column: Column, better: str, worse: str) -> str:
    return "level with" if found.value == 0 else worse if _is_worse(found.value, column) else better


def _amount(found: Difference, column: Column) -> str:
    """``by 2.50 points (−1.20 to 6.20; p = 0.18, not significant)``, all in the direction that the sentence names."""
    unit = " points" if column.scale == 100 else ""
    by = f"by {number(abs(found.value))}{unit} " if found.value else ""
    if found.p is None:
        return f"{by}({found.method})"
    verdict = f"{p_text(found.p)}, {'significant' if found.real else 'not significant'}"
    if found.low is None or found.high is None or found.low == found.high:
        return f"{by}({verdict})"
    ends = sorted((found.low, found.high)) if found.value >= 0 else sorted((-found.low, -found.high))
    return f"{by}({' to '.join(map(number, ends))}; {verdict})"


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _is_worse(value: float, column: Column) -> bool:
    return value != 0 and (value < 0) == column.higher_is_better


def _count(number_of: int, word: str) -> str:
    return f"{number_of} {word}{'' if number_of == 1 else 's'}"


def effects(table: Table) -> list[Effect]:
    """What each choice changes: settings that differ in that one choice alone, as pairs, over all base models."""
    rows = [row for row in table.rows if not row.is_base]
    facts = {row.setting: _choices(row) for row in rows}
    columns = measures(table)
    found = []
    for axis in AXES:
        values = sorted(dict.fromkeys(facts[row.setting][axis] for row in rows), key=_in_order(axis))
        for i, first in enumerate(values if len(values) <= MOST_VALUES else values[:1]):
            for second in values[i + 1 :]:
                pairs = list(_pairs(rows, facts, axis, first, second))
                if pairs:
                    found.append(_effect(axis, first, second, pairs, columns))
    return found


def _in_order(axis: str) -> Callable[[str], tuple[float, ...]]:
    """Budgets by their tokens and numbers by their size; words stay in the sweep's order."""

    def key(value: str) -> tuple[float, ...]:
        try:
            numbers = [float(part) for part in value.split("+")] if axis == "budget" else [float(value)]
        except ValueError:
            return (0.0,)
        return (math.fsum(numbers), *numbers[1:])

    return key


def _choices(row: Row) -> dict[str, str]:
    """Every choice of a setting as text. What follows from another choice by default is no choice of its own."""
    record = next(iter(row.samples.values()))[0]
    found = {axis: str(record[axis]) for axis in AXES}
    if record["learning_rate"] == TrainSettings().peak_learning_rate(record["adaptation"]):
        found["learning_rate"] = "the default"
    if record["merge"] == ("shared" if record["mechanism"] == "hedgehog" and record["window"] else "sum"):
        found["merge"] = "the mechanism's own"
    return {**found, "base": row.base_setting}


def _pairs(rows: Sequence[Row], facts: dict[str, dict[str, str]], axis: str, first: str, second: str) -> Iterator[tuple[Row, Row]]:
    def others(row: Row) -> tuple[tuple[str, str], ...]:
        return tuple((name, value) for name, value in facts[row.setting].items() if name != axis)

    twins = {others(row): row for row in rows if facts[row.setting][axis] == second}
    for row in rows:
        if facts[row.setting][axis] == first and others(row) in twins:
            yield row, twins[others(row)]


def _effect(axis: str, first: str, second: str, pairs: Sequence[tuple[Row, Row]], columns: Sequence[Column]) -> Effect:
    means, better, worse = {}, {}, {}
    for column in columns:
        shown = [(a, b) for a, b in pairs if all(c.entries.get(column) and c.entries[column].value is not None for c in (a, b))]
        found = [d for a, b in shown if (d := difference(a.samples[column], b.samples[column], column)) is not None]
        if found:
            means[column] = math.fsum(d.value for d in found) / len(found)
            better[column] = sum(d.real and not _is_worse(d.value, column) for d in found)
            worse[column] = sum(d.real and _is_worse(d.value, column) for d in found)
    return Effect(axis=axis, first=first, second=second, pairs=len(pairs), means=means, better=better, worse=worse)


def cautions(table: Table) -> list[str]:
    """What keeps these numbers from saying more: single seeds, missing cells, flags, small samples."""
    rows = [row for row in table.rows if not row.is_base]
    said = []
    if single := sum(row.facts["seeds"] == 1 for row in rows):
        said.append(f"{single} of {_count(len(rows), 'setting')} ran with one seed: chance in the training is not in their p.")
    missing = sum(entry.value is None for row in table.rows for entry in row.entries.values())
    partial = sum(entry.partial for row in table.rows for entry in row.entries.values())
    if missing or partial:
        said.append(f"{_count(missing, 'score')} missing and {partial} partial (some seeds only); the reasons are below.")
    flagged = sorted({f"{row.recipe}, {c.title}: {e.flags}" for row in rows for c, e in row.entries.items() if e.flags})
    if flagged:
        said.append("Flagged: " + "; ".join(flagged[:6]) + (f" and {len(flagged) - 6} more." if len(flagged) > 6 else "."))
    if len(rows) > 1:
        said.append("The p are of single comparisons: among twenty of them one is below 0.05 by chance.")
    return said
