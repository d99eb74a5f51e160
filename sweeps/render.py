"""A finished table in one of its views as Markdown, CSV, LaTeX, HTML, JSON, or for the terminal. Imports no torch."""

from __future__ import annotations

import csv
import html
import io
import json
from typing import TYPE_CHECKING, Any

from sweeps.tables import Entry, Table, summary
from sweeps.views import Best, Grid, view

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

FORMATS = ("markdown", "csv", "latex", "html", "json", "text")
TEX = {
    "\\": r"\textbackslash{}", "_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
    "−": "$-$", "–": "--", **{mark: f"$^{digit}$" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
}  # fmt: skip


def render(data: pd.DataFrame | Table, format: str = "markdown", *, title: str = "", show: str = "summary") -> str:
    """A frame's summary (or a table) in one of ``FORMATS``, in one of ``views.VIEWS``.

    ``csv`` of a frame is the frame itself, every row of it; ``json`` of the summary has numbers instead of text. Raises
    ValueError for another format or view.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    if format == "csv" and not isinstance(data, Table) and show == "summary":
        return data.drop(columns="values", errors="ignore").to_csv(index=False)
    table = data if isinstance(data, Table) else summary(data, title=title)
    if format == "json" and show == "summary":
        return _json(table)
    return _WRITERS[format](view(table, show))


def _marked(text: str, mark: str) -> str:
    return f"{mark}{text}{mark}" if isinstance(text, Best) else text


def _markdown(grid: Grid) -> str:
    lines = [f"**{grid.title}**", ""] if grid.title else []
    lines += [f"| {' | '.join(grid.header)} |", f"|{'|'.join(['---', '---', *['--:'] * (len(grid.header) - 2)])}|"]
    lines += [f"| {' | '.join(_marked(cell, '**').replace('|', '/') for cell in row)} |" for row in grid.body]
    return "\n".join([*lines, "", *(f"- {note}" for note in grid.notes)]).rstrip() + "\n"


def _csv(grid: Grid) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([grid.header, *grid.body])
    return out.getvalue()


def _latex(grid: Grid) -> str:
    lines = [rf"\begin{{tabular}}{{ll{'r' * (len(grid.header) - 2)}}}", r"\toprule"]
    lines += [" & ".join(map(_tex, grid.header)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(_tex, row)) + r" \\" for row in grid.body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in grid.notes)]) + "\n"


def _tex(text: str) -> str:
    made = "".join(TEX.get(character, character) for character in text)
    return rf"\textbf{{{made}}}" if isinstance(text, Best) else made


def _html(grid: Grid) -> str:
    head = "".join(f"<th>{breakable(cell)}</th>" for cell in grid.header)
    rows = "".join(f"<tr>{''.join(map(_place, row))}</tr>\n" for row in grid.body)
    caption = f"<caption>{html.escape(grid.title)}</caption>" if grid.title else ""
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in grid.notes)
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>"
    listed = f'<ul class="notes">{notes}</ul>\n' if notes else ""
    return f'<div class="wide"><table class="golinear">{caption}{body}</table></div>\n{listed}'


def breakable(text: str) -> str:
    """HTML of a task's name that may break after an underscore and before its length."""
    return html.escape(text).replace("_", "_<wbr>").replace("@", "<wbr>@")


def _place(text: str) -> str:
    """A place of an HTML table: what stands in brackets is small."""
    value, bracket, further = text.partition(" (")
    small = f" <small>{html.escape(bracket.strip() + further)}</small>" if bracket else ""
    kind = ' class="best"' if isinstance(text, Best) else ""
    return f"<td{kind}>{html.escape(value)}{small}</td>"


def _rows_json(grid: Grid) -> str:
    rows = [dict(zip(grid.header, row)) for row in grid.body]
    return json.dumps({"title": grid.title, "rows": rows, "notes": grid.notes}, indent=2, ensure_ascii=False)


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


def _text(grid: Grid) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(grid))
    for note in grid.notes:
        console.print(note, style="dim", markup=False)
    return console.export_text()


def rich_table(grid: Grid) -> RichTable:
    """For the terminal, without the footnotes."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    made = RichTable(title=grid.title or None)
    for position, name in enumerate(grid.header):
        made.add_column(name, justify="left" if position < 2 else "right")
    for row in grid.body:
        made.add_row(*(f"[bold]{escape(cell)}[/]" if isinstance(cell, Best) else escape(cell) for cell in row))
    return made


_WRITERS = {"markdown": _markdown, "csv": _csv, "latex": _latex, "html": _html, "json": _rows_json, "text": _text}
