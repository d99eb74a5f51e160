"""Figures of a study. Each says what it lacks where it has nothing, or not everything, to draw. Imports no torch.

``draw`` makes them all; ``write`` saves them as SVG and PNG. Looks: ``linear_core.style``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linear_core import style
from sweeps.cell import slug
from sweeps.findings import measures
from sweeps.plots import (
    Drawing,
    Looks,
    cut,
    drop,
    frontier,
    half,
    has,
    legend,
    line,
    maybe_log,
    missing,
    quality,
    short,
    spans_orders,
)
from sweeps.tables import Column, Entry, Row, Table
from sweeps.views import column_text

if TYPE_CHECKING:
    from sweeps.study import Study

ACROSS = 3  # panels side by side
MOST_PANELS = 6
MOST_LINES = 14
MOST_BASES = 3
FLOOR = 1e-3  # nMSE that a map shows as its darkest: below it are roundings of the exact path
TALLEST = 9.0  # inches, what a printed page holds
SPEEDS = {"tokens_per_s": "decoded tokens/s ↑", "prefill_tokens_per_s": "prefill tokens/s ↑", "cache_mib": "cache, MiB a sequence ↓"}
PATHS = (("exact path alone", "exact"), ("state alone", "linear"), ("state frozen half way", "frozen"))


def draw(study: Study) -> list[Drawing]:
    """All figures of a study, in the order of a report. Call inside ``style.drawing()``."""
    table = study.table()
    made = [drawing for base in table.rows if base.is_base for drawing in scores(table, base)]
    rest: list[Callable[[], Drawing]] = [
        lambda: size(table), lambda: budget(table), lambda: cost(table), lambda: attribution(study),
        lambda: lengths(table), lambda: latency(study), lambda: errors(study), lambda: curves(study),
    ]  # fmt: skip
    return made + [make() for make in rest]


def write(study: Study, folder: Path) -> tuple[list[Path], list[Drawing]]:
    """Every figure as SVG and PNG in a folder; returns the files, and the drawings that could not be made."""
    made: list[Path] = []
    with style.drawing():
        drawings = draw(study)
        for drawing in drawings:
            if drawing.figure is not None:
                made += style.save(drawing.figure, folder / drawing.name)
    return made, [drawing for drawing in drawings if drawing.figure is None]


def scores(table: Table, base: Row) -> Iterator[Drawing]:
    """Every setting's score on every measure, with its 95 % interval, three measures a figure; dashed: the base model."""
    rows = [row for row in table.rows if not row.is_base and row.base_setting == base.setting]
    columns = [c for c in measures(table) if any(has(row, c) for row in rows)]
    name, title = f"scores-{slug(base.base)}", f"Scores of each setting, {base.base}"
    if not columns:
        yield Drawing(name=name, title=title, lacks=("no setting has a score yet",))
    for number, start in enumerate(range(0, len(columns), ACROSS), start=1):
        part = columns[start : start + ACROSS]
        figure, axes = style.new_figure(1, min(ACROSS, len(columns)), height=min(TALLEST, 0.85 + 0.2 * len(rows)))
        drop(axes[len(part) :])
        for axis, column in zip(axes, part):
            _scores_of(axis, table, rows, base, column)
            axis.set_yticks(range(len(rows), 0, -1), [row.recipe for row in rows] if axis is axes[0] else [""] * len(rows))
        yield Drawing(
            name=name if len(columns) <= ACROSS else f"{name}-{number}", figure=figure, lacks=tuple(missing(rows, part)),
            title=title if len(columns) <= ACROSS else f"{title} ({number} of {math.ceil(len(columns) / ACROSS)})",
            caption="Dashed: the base model. Bars: 95 % interval, of the items with one seed, of the seeds' mean with more; "
            "differences are judged in pairs, so bars that overlap may still differ by more than chance.",
        )  # fmt: skip


def _scores_of(axis: Any, table: Table, rows: Sequence[Row], base: Row, column: Column) -> None:
    looks = Looks(table)
    for place, row in zip(range(len(rows), 0, -1), rows):
        if not has(row, column):
            asked = "missing" if column in row.entries else "not asked"
            axis.text(0.5, place, asked, transform=axis.get_yaxis_transform(), ha="center", va="center", color="#777777", size=7)
            continue
        colour, mark = looks.of(row)
        axis.errorbar(row.entries[column].value, place, xerr=half(row.entries[column]), fmt=mark, color=colour, capsize=2)
    if has(base, column):
        axis.axvline(base.entries[column].value, color=style.BASE_COLOUR, linestyle="--", linewidth=1)
    axis.set(title=column_text(column), ylim=(0.4, len(rows) + 0.6))
    if not column.higher_is_better:
        maybe_log(axis, [row.entries[column].value for row in (*rows, base) if has(row, column)])


def size(table: Table) -> Drawing:
    """Score against the base model's size: base, linearized, and the gap between them."""
    name, title = "size", "Score against model size"
    bases = sorted((row for row in table.rows if row.is_base), key=lambda row: row.facts["base_parameters"])
    if len(bases) < 2:
        return Drawing(name=name, title=title, lacks=("needs at least two base models of different size; this study has one",))
    asked = [c for c in measures(table) if sum(has(row, c) for row in bases) > 1]
    columns = asked[:ACROSS]
    if not columns:
        return Drawing(name=name, title=title, lacks=("no measure has a score on two base models yet",))
    figure, axes = style.new_figure(2, len(columns), height=2.3)
    looks = Looks(table)
    recipes = list(dict.fromkeys(row.recipe for row in table.rows if not row.is_base))
    sizes = [row.facts["base_parameters"] for row in bases]
    for above, below, column in zip(axes, axes[len(columns) :], columns):
        line(above, [(b.facts["base_parameters"], b.entries.get(column)) for b in bases], looks.of(bases[0]), "base")
        for recipe in recipes[:MOST_LINES]:
            rows = [r for b in bases for r in table.rows if r.recipe == recipe and r.base_setting == b.setting]
            points = [(row.facts["base_parameters"], row.entries.get(column)) for row in rows]
            line(above, points, looks.of(rows[0]), recipe)
            gaps = [(x, None if e is None or e.gap is None else Entry(value=e.gap)) for x, e in points]
            line(below, gaps, looks.of(rows[0]), recipe)
        below.axhline(0, color=style.BASE_COLOUR, linewidth=0.8)
        above.set(title=column_text(column), ylabel="score" if above is axes[0] else "")
        below.set(xlabel="parameters of the base model", ylabel="gap to the base" if above is axes[0] else "")
        for axis in (above, below):
            axis.set_xscale("log")
            axis.set_xticks(sizes, [short(n) for n in sizes])
            axis.minorticks_off()
    legend(figure, axes[0])
    shown = [row for row in table.rows if row.is_base or row.recipe in recipes[:MOST_LINES]]
    lacks = missing(shown, columns) + cut(recipes, recipes[:MOST_LINES], "settings") + cut(asked, columns, "measures")
    return Drawing(name=name, title=title, caption="Above: scores; below: the gap to the base model.", figure=figure, lacks=tuple(lacks))


def budget(table: Table) -> Drawing:
    """Score against the budget of exact attention, a line for everything else that a setting is."""
    name, title = "budget", "Score against the budget of exact attention"
    rows = sorted((row for row in table.rows if not row.is_base), key=_budget)
    budgets = list(dict.fromkeys(row.facts["budget"] for row in rows))
    if len(budgets) < 2:
        return Drawing(name=name, title=title, lacks=("needs cells with at least two budgets; this study has one",))
    asked = [c for c in measures(table) if any(has(row, c) for row in rows)]
    columns = asked[:MOST_PANELS]
    if not columns:
        return Drawing(name=name, title=title, lacks=("no setting has a score yet",))
    figure, axes = style.new_figure(math.ceil(len(columns) / ACROSS), min(ACROSS, len(columns)), height=2.4)
    lines = _lines(table, rows)
    shown = dict(list(lines.items())[:MOST_LINES])
    adaptations = list(dict.fromkeys(row.facts["adaptation"] for row in rows))
    for axis, column in zip(axes, columns):
        for label, group in shown.items():
            look = (Looks(table).of(group[0])[0], style.marker(adaptations.index(group[0].facts["adaptation"])))
            line(axis, [(budgets.index(row.facts["budget"]), row.entries.get(column)) for row in group], look, label)
        for base in (row for row in table.rows if row.is_base and has(row, column)):
            axis.axhline(base.entries[column].value, color=style.BASE_COLOUR, linestyle="--", linewidth=1)
        values = [row.entries[column].value or 0.0 for row in rows if has(row, column)]
        if not column.higher_is_better and spans_orders(values):
            axis.set_yscale("log")
        axis.set_xticks(range(len(budgets)), budgets)
        axis.set(title=column_text(column), xlim=(-0.3, len(budgets) - 0.7))
    drop(axes[len(columns) :])
    legend(figure, axes[0])
    lacks = missing(rows, columns) + cut(list(lines), list(shown), "lines") + cut(asked, columns, "measures")
    caption = "Window + sinks, from left to right more tokens. Dashed: the base model."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(lacks))


def _budget(row: Row) -> tuple[int, int]:
    return row.facts["window"] + row.facts["sinks"], row.facts["sinks"]


def _lines(table: Table, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Settings that share all but their budget, by what they share."""
    looks = Looks(table)
    found: dict[str, list[Row]] = {}
    for row in rows:
        label = " ".join(word for word in looks.name(row).split() if word != row.facts["budget"])
        found.setdefault(label, []).append(row)
    return found


def cost(table: Table) -> Drawing:
    """Quality against what decoding costs: bytes of cache, and tokens a second where they were measured."""
    name, title = "cost", "Quality against memory and speed of decoding"
    asked = [c for c in measures(table) if c.higher_is_better]
    bases = [row for row in table.rows if row.is_base]
    columns = [c for c in asked if all(has(base, c) for base in bases)]
    found = {row.setting: quality(row, columns) for row in table.rows}
    shown_bases = [b for b in bases if any(found[r.setting] is not None for r in _cells(table, b))][:MOST_BASES]
    if not shown_bases:
        why = "no setting has all the scores that quality is the mean of" if columns else "no measure in per cent has a base value"
        return Drawing(name=name, title=title, lacks=(why,))
    speeds = [c for c in table.columns if c.spec.name == "latency"][:1]
    figure, axes = style.new_figure(1 + len(speeds), len(shown_bases), height=2.4)
    for i, base in enumerate(shown_bases):
        rows = [row for row in (base, *_cells(table, base)) if found[row.setting] is not None]
        memory = [row.facts["cache_bytes"] / 2**20 for row in rows]
        _pareto(axes[i], table, rows, memory, [found[row.setting] or 0.0 for row in rows], more_is_better=False)
        axes[i].set(xlabel="cache after 32,768 tokens, MiB", title=base.base if len(bases) > 1 else "")
        for column in speeds:
            there = [row for row in rows if has(row, column)]
            axis = axes[len(shown_bases) + i]
            rates = [row.entries[column].value or 0.0 for row in there]
            _pareto(axis, table, there, rates, [found[row.setting] or 0.0 for row in there], more_is_better=True)
            axis.set(xlabel=f"decoded tokens/s after {column.spec.length:,} tokens")
    for axis in axes[:: len(shown_bases)]:
        axis.set_ylabel("share of the base kept, %")
    legend(figure, *axes)
    lacks = [f"{Looks(table).name(row)} lacks a score" for row in table.rows if found[row.setting] is None and not row.is_base]
    lacks += [f"{c.title}: the base model has no score" for c in asked if c not in columns] + cut(bases, shown_bases, "base models")
    lacks += [] if speeds else ["decoding speed, which was not measured (the task latency, e.g. latency@2048)"]
    said = ", ".join(c.title for c in columns)
    caption = f"Share kept: mean over {said}. Grey: settings that no other beats in both."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(lacks))


def _cells(table: Table, base: Row) -> list[Row]:
    return [row for row in table.rows if not row.is_base and row.base_setting == base.setting]


def _pareto(
    axis: Any, table: Table, rows: Sequence[Row], costs: Sequence[float], qualities: Sequence[float], *, more_is_better: bool
) -> None:
    looks = Looks(table)
    front = frontier(list(zip(costs, qualities)), more_is_better)
    if front:
        axis.plot(*zip(*front), color="#999999", linewidth=1, drawstyle="steps-pre" if more_is_better else "steps-post", zorder=1)
    for row, x, y in zip(rows, costs, qualities):
        colour, mark = looks.of(row)
        axis.plot(x, y, mark, color=colour, label=row.recipe, linestyle="none")
    maybe_log(axis, costs)


def attribution(study: Study) -> Drawing:
    """What the state contributes, and what is left when only one path, or a state frozen half way, is used."""
    name, title = "attribution", "Who does the work: window or state"
    table = study.table(all_metrics=True)
    columns = {c.metric: c for c in table.columns if c.spec.name == "attribution"}
    saved = columns.get("state_nats")
    asked = [row for row in table.rows if saved is not None and saved in row.entries]
    rows = [row for row in asked if saved is not None and has(row, saved)]
    if saved is None or not rows:
        return Drawing(name=name, title=title, lacks=("no attribution was measured: add the task attribution",))
    looks = Looks(table)
    figure, axes = style.new_figure(1, 2, height=min(TALLEST, 1.2 + 0.24 * len(rows)))
    places = list(range(len(rows), 0, -1))
    nats = [row.entries[saved] for row in rows]
    axes[0].barh(places, [e.value for e in nats], xerr=[half(e) or 0.0 for e in nats], color=[looks.of(r)[0] for r in rows],
                 capsize=2, height=0.7, error_kw={"elinewidth": 1})  # fmt: skip
    axes[0].axvline(0, color=style.BASE_COLOUR, linewidth=0.8)
    axes[0].set_yticks(places, [looks.name(row) for row in rows])
    axes[0].set(xlabel="nats a token that the state saves", ylim=(0.4, len(rows) + 0.6))
    for position, (label, metric) in enumerate(PATHS):
        there = [(row.entries[columns[metric]].value, p) for p, row in zip(places, rows) if metric in columns and has(row, columns[metric])]
        if there:
            axes[1].plot(*zip(*there), style.marker(position + 1), color=style.colour(position), linestyle="none", label=label)
    both = [((row.entries[columns["exact"]].value or 0.0) / math.exp(row.entries[saved].value or 0.0), p)
            for p, row in zip(places, rows) if "exact" in columns and has(row, columns["exact"])]  # fmt: skip
    if both:
        axes[1].plot(*zip(*both), "|", color=style.BASE_COLOUR, markersize=9, markeredgewidth=2, linestyle="none", label="both paths")
    axes[1].set_yticks(places, [""] * len(rows))
    axes[1].set(xlabel="perplexity ↓", xscale="log", ylim=(0.4, len(rows) + 0.6))
    axes[1].xaxis.set_major_formatter(short)
    legend(figure, axes[1])
    caption = "Left: loss without the state minus loss with it, 95 % interval. Right: perplexity by path."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(missing(asked, [saved])))


def lengths(table: Table) -> Drawing:
    """Tasks that were asked at several prompt lengths (RULER), by length."""
    name, title = "lengths", "Scores by prompt length"
    tasks: dict[str, list[Column]] = {}
    for column in table.columns:
        if column.spec.length is not None and column.spec.name != "latency":
            tasks.setdefault(column.spec.name, []).append(column)
    tasks = {task: sorted(cs, key=lambda c: c.spec.length or 0) for task, cs in tasks.items() if len({c.spec.length for c in cs}) > 1}
    if not tasks:
        return Drawing(name=name, title=title, lacks=("no task was asked at two lengths: e.g. niah_single_1@1024,niah_single_1@2048",))
    shown = dict(list(tasks.items())[:MOST_PANELS])
    every = [c for cs in shown.values() for c in cs]
    cells = sorted((row for row in table.rows if not row.is_base), key=lambda row: -_mean(row, every))
    rows = [*(row for row in table.rows if row.is_base), *cells[:MOST_LINES]]
    figure, axes = style.new_figure(math.ceil(len(shown) / ACROSS), min(ACROSS, len(shown)), height=2.6)
    looks = Looks(table)
    for axis, (task, columns) in zip(axes, shown.items()):
        for row in rows:
            line(axis, [(c.spec.length or 0, row.entries.get(c)) for c in columns], looks.of(row), looks.name(row))
        at = [c.spec.length or 0 for c in columns]
        axis.set(title=f"{task} ↑", xlabel="tokens of the prompt", xscale="log", ylim=(-4, 104))
        axis.set_xticks(at, [f"{n:,}" for n in at])
        axis.minorticks_off()
    drop(axes[len(shown) :])
    legend(figure, *axes[: len(shown)])
    lacks = missing(rows, every) + cut(cells, cells[:MOST_LINES], "settings with lower scores") + cut(list(tasks), list(shown), "tasks")
    return Drawing(name=name, title=title, caption="Black: the base model.", figure=figure, lacks=tuple(lacks))


def latency(study: Study) -> Drawing:
    """Speed of decoding and prefill, and the cache, by length (the paper's figure 2a)."""
    name, title = "latency", "Speed and cache by length"
    table = study.table(all_metrics=True)
    found: dict[str, list[Column]] = {metric: [] for metric in SPEEDS}
    for column in table.columns:
        if column.spec.name == "latency":
            found[column.metric].append(column)
    at = sorted({c.spec.length or 0 for c in found["tokens_per_s"]})
    if len(at) < 2:
        return Drawing(name=name, title=title, lacks=("speed was not measured at two lengths: e.g. latency@2048,latency@8192",))
    figure, axes = style.new_figure(1, len(SPEEDS), height=2.6)
    looks, rows = Looks(table), table.rows[: MOST_LINES + 1]
    for axis, (metric, label) in zip(axes, SPEEDS.items()):
        columns = sorted(found[metric], key=lambda c: c.spec.length or 0)
        for row in rows:
            line(axis, [(c.spec.length or 0, row.entries.get(c)) for c in columns], looks.of(row), looks.name(row))
        axis.set(title=label, xlabel="tokens", xscale="log")
        axis.set_xticks(at, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in at])
        axis.xaxis.minorticks_off()
        if spans_orders([row.entries[c].value or 0.0 for row in rows for c in columns if has(row, c)]):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(short)
    legend(figure, *axes)
    sources = dict.fromkeys(c.source for c in found["tokens_per_s"])
    lacks = missing(rows, [c for cs in found.values() for c in cs]) + cut(table.rows, rows, "settings")
    caption = f"Eight sequences at a time; black: the base model. {'; '.join(sources)}."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(lacks))


def _mean(row: Row, columns: Sequence[Column]) -> float:
    values = [row.entries[c].value or 0.0 for c in columns if has(row, c)]
    return math.fsum(values) / len(values) if values else -1.0


def errors(study: Study) -> Drawing:
    """Error of each layer's attention output by token, against the base model's on the same inputs."""
    name, title = "errors", "Attention error (nMSE) by layer and token"
    there = [cell for cell in study.cells if study.maps.get(cell["key"], {}).get("nmse")]
    if not there:
        return Drawing(name=name, title=title, lacks=("no layer errors were measured: add the task diagnostics",))
    from matplotlib.colors import LogNorm

    shown = there[:MOST_PANELS]
    across = min(2, len(shown))
    figure, axes = style.new_figure(math.ceil(len(shown) / across), across, height=2.6)
    most = max(v for cell in shown for layer in study.maps[cell["key"]]["nmse"] for v in layer)
    norm = LogNorm(FLOOR, max(most, 1.0), clip=True)
    for axis, cell in zip(axes, shown):
        found = study.maps[cell["key"]]
        edges = [start for start, _ in found["positions"]] + [found["positions"][-1][1]]
        layers = [layer - 0.5 for layer in range(len(found["layers"]) + 1)]
        shades = [[max(value, FLOOR) for value in layer] for layer in found["nmse"]]
        image = axis.pcolormesh(edges, layers, shades, norm=norm, cmap=style.SEQUENTIAL, rasterized=True)
        axis.set(title=cell["label"], xlabel="token", ylabel="layer", xscale="log")
        axis.xaxis.set_major_formatter(short)
        axis.grid(False)
        step = max(1, len(found["layers"]) // 8)
        axis.set_yticks(range(0, len(found["layers"]), step), [str(n) for n in found["layers"][::step]])
    drop(axes[len(shown) :])
    figure.colorbar(image, ax=axes[: len(shown)], label="nMSE", fraction=0.04, extend="min")
    unmeasured = [cell["label"] for cell in study.cells if not cell["is_base"] and cell not in there]
    lacks = ([f"{', '.join(unmeasured[:4])}: not measured"] if unmeasured else []) + cut(there, shown, "cells")
    caption = "Mean squared error of a layer's output over its variance; 1: no better than the mean; darkest: 0.001 or less."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(lacks))


def curves(study: Study) -> Drawing:
    """Training loss over tokens, a line a cell, a panel a base model and mechanism."""
    name, title = "training", "Training curves"
    cells = [cell for cell in study.cells if cell["new_parameters"]]
    there = [cell for cell in cells if study.curves.get(cell["key"], {}).get("loss")]
    if not there:
        return Drawing(name=name, title=title, lacks=("no cell has a training curve",))
    table = study.table()
    looks, rows = Looks(table), {row.setting: row for row in table.rows}
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    many = len({cell["setting"] for cell in there}) > ACROSS
    for cell in there:
        panels.setdefault((cell["base"], cell["mechanism"] if many else ""), []).append(cell)
    shown = dict(list(panels.items())[: 2 * ACROSS])
    rests = list(dict.fromkeys(_rest(rows[cell["setting"]], mechanism) for (_, mechanism), part in shown.items() for cell in part))
    figure, axes = style.new_figure(math.ceil(len(shown) / ACROSS), min(ACROSS, len(shown)), height=2.5)
    for axis, ((base, mechanism), group) in zip(axes, shown.items()):
        for position, cell in enumerate(group):
            row, curve = rows[cell["setting"]], study.curves[cell["key"]]
            colour = style.colour(rests.index(_rest(row, mechanism))) if many else looks.of(row)[0]
            axis.plot(curve["tokens_seen"], curve["loss"], color=colour, linewidth=1, marker=looks.of(row)[1], markersize=3.5,
                      markevery=(position % 8, max(1, len(curve["loss"]) // 8)), label=_rest(row, mechanism))  # fmt: skip
        several = len({base for base, _ in shown}) > 1
        axis.set(title=f"{base} {mechanism}".strip() if several else mechanism, xlabel="training tokens")
        axis.xaxis.set_major_formatter(short)
    for axis in axes[::ACROSS]:
        axis.set_ylabel("loss, nats a token")
    drop(axes[len(shown) :])
    legend(figure, *axes[: len(shown)])
    lacks = cut(cells, there, "cells have no curve") + cut(list(panels), list(shown), "panels")
    caption = "A line a cell, seeds in one colour; up to 128 means of consecutive steps a line."
    return Drawing(name=name, title=title, caption=caption, figure=figure, lacks=tuple(lacks))


def _rest(row: Row, mechanism: str) -> str:
    """A setting's name without the mechanism that its panel is named after."""
    return row.recipe.removeprefix(mechanism).strip() if mechanism else row.recipe
