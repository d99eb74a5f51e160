"""A finished table as Markdown, CSV, LaTeX, HTML, JSON, or for the terminal. Imports no torch."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sweeps.tables import Column, Entry, Row, Table, summary

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

FORMATS = ("markdown", "csv", "latex", "html", "json", "text")
DASH = "–"
FACTS = ("seeds", "new parameters", "cache at 32k", "tokens", "minutes")
SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
TEX = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "−": "$-$", "–": "--", **{mark: f"$^{digit}$" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}  # fmt: skip


def render(data: pd.DataFrame | Table, format: str = "markdown", *, title: str = "") -> str:
    """A frame's summary (or a table) in one of ``FORMATS``. ``csv`` of a frame is the frame itself, every row of it.

    Raises ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    if format == "csv" and not isinstance(data, Table):
        return data.drop(columns="values", errors="ignore").to_csv(index=False)
    table = data if isinstance(data, Table) else summary(data, title=title)
    return _WRITERS[format](table)


def grid(table: Table, strong: str = "") -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows of text, footnotes: what all text formats share."""
    notes = dict.fromkeys(entry.note for row in table.rows for entry in row.entries.values() if entry.note)
    marks = {note: str(count).translate(SUPERSCRIPT) for count, note in enumerate(notes, start=1)}
    header = ["model", "recipe", *(f"{c.title} {'↑' if c.higher_is_better else '↓'}" for c in table.columns), *FACTS]
    body = [
        [row.base, row.recipe, *(_shown(row.entries.get(c), marks, strong) for c in table.columns), *_facts(row)]
        for row in table.rows
    ]
    return header, body, [*(f"{mark} {note}" for note, mark in marks.items()), *map(source_text, table.columns)]


def source_text(column: Column) -> str:
    """Where a column's numbers come from, e.g. ``mmlu: acc of 14042 items; hub cais/mmlu; lm-eval 0.4.13``."""
    items = "" if column.samples is None else f" of {column.samples} items"
    return "; ".join([f"{column.title}: {column.metric}{items}", *filter(None, (column.source, column.harness))])


def _shown(entry: Entry | None, marks: Mapping[str, str], strong: str) -> str:
    """An entry's text; the best of its column, where that is sure, between ``strong`` marks."""
    text = entry_text(entry, marks)
    return f"{strong}{text}{strong}" if entry is not None and entry.best else text


def entry_text(entry: Entry | None, marks: Mapping[str, str]) -> str:
    """``68.8 ± 0.3 (−6.0; paper 68.8)``; ``–`` with its footnote's mark when missing; empty when not asked for."""
    if entry is None:
        return ""
    mark = marks[entry.note] if entry.note else ""
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
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _facts(row: Row) -> list[str]:
    facts = row.facts
    cache, minutes = f"{facts['cache_bytes'] / 2**20:.1f} MiB", facts["minutes"]
    if row.is_base:
        return ["", "", cache, "", ""]
    parameters, spent = f"{facts['new_parameters'] / 1e6:.2f}M", "" if minutes is None else f"{minutes:.1f}"
    return [str(facts["seeds"]), parameters, cache, f"{facts['tokens']:,}", spent]


def _markdown(table: Table) -> str:
    header, body, notes = grid(table, strong="**")
    lines = [f"**{table.title}**", ""] if table.title else []
    lines += [f"| {' | '.join(header)} |", f"|{'|'.join(['---', '---', *['--:'] * (len(header) - 2)])}|"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in body]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def _csv(table: Table) -> str:
    header, body, _ = grid(table)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *body])
    return out.getvalue()


def _latex(table: Table) -> str:
    header, body, notes = grid(table)
    lines = [rf"\begin{{tabular}}{{ll{'r' * (len(header) - 2)}}}", r"\toprule"]
    lines += [" & ".join(map(_tex, header)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_tex, row)) + r" \\" for row in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes)]) + "\n"


def _tex(text: str) -> str:
    return "".join(TEX.get(character, character) for character in text)


def _html(table: Table) -> str:
    header, body, notes = grid(table)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in body)
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    body_html = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>"
    return f'<table class="golinear">{caption}{body_html}</table>\n<ul class="notes">{listed}</ul>\n'


def _json(table: Table) -> str:
    rows = [
        {
            "base": row.base, "recipe": row.recipe, "setting": row.setting, "is_base": row.is_base, **row.facts,
            "scores": {column.title: _entry_json(entry) for column, entry in row.entries.items()},
        }
        for row in table.rows
    ]  # fmt: skip
    columns = [{"title": c.title, "metric": c.metric, "source": c.source, "harness": c.harness} for c in table.columns]
    return json.dumps({"title": table.title, "columns": columns, "rows": rows}, indent=2, ensure_ascii=False)


def _entry_json(entry: Entry) -> dict[str, Any]:
    said = {k: v for k, v in vars(entry).items() if v is not None and v is not False and v != ""}
    return {"value": None, **said}


def _text(table: Table) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    shown = rich_table(table)
    shown.caption = None
    console.print(shown)
    for note in grid(table)[2]:
        console.print(note, style="dim", markup=False)
    return console.export_text()


def rich_table(table: Table) -> RichTable:
    """For the terminal; footnotes are the caption."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    header, body, notes = grid(table)
    made = RichTable(title=table.title or None, caption="\n".join(map(escape, notes)) or None, caption_justify="left")
    for position, name in enumerate(header):
        made.add_column(name, justify="left" if position < 2 else "right")
    for row in body:
        made.add_row(*map(escape, row))
    return made


_WRITERS = {"markdown": _markdown, "csv": _csv, "latex": _latex, "html": _html, "json": _json, "text": _text}
