"""A finished table as Markdown, CSV, LaTeX, HTML, JSON, or for the terminal. Imports no torch."""

from __future__ import annotations

import csv
import html
import io
import json
from typing import TYPE_CHECKING, Any

from sweeps.tables import Column, Entry, Row, Table, summary

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable

FORMATS = ("markdown", "csv", "latex", "html", "json", "text")
DASH = "–"


def render(data: pd.DataFrame | Table, format: str = "markdown", *, title: str = "") -> str:
    """A frame's summary (or a table) in one of ``FORMATS``. ``csv`` of a frame is the frame itself, every row of it.

    Raises ValueError for another format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not known; allowed: {', '.join(FORMATS)}")
    if format == "csv" and not isinstance(data, Table):
        return data.to_csv(index=False)
    table = data if isinstance(data, Table) else summary(data, title=title)
    return _WRITERS[format](table)


def grid(table: Table) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows of text, footnotes: what all text formats share."""
    marks = {note: str(number) for number, note in enumerate(dict.fromkeys(_notes(table)), start=1)}
    header = [
        "model",
        "recipe",
        *(_header(column) for column in table.columns),
        "new parameters",
        "cache at 32k",
        "tokens",
        "minutes",
    ]
    body = []
    for row in table.rows:
        cells = [entry_text(row.entries.get(column), column, marks) for column in table.columns]
        body.append([row.base, row.recipe, *cells, *_facts(row)])
    sources = [f"{column.title}: {column.source}" for column in table.columns if column.source]
    return header, body, [*(f"{mark}) {note}" for note, mark in marks.items()), *sources]


def _notes(table: Table) -> list[str]:
    return [entry.note for row in table.rows for entry in row.entries.values() if entry.note]


def _header(column: Column) -> str:
    return f"{column.title} {'↑' if column.higher_is_better else '↓'}"


def entry_text(entry: Entry | None, column: Column, marks: dict[str, str]) -> str:
    """``68.8 ± 0.3 (−6.0; paper 68.8)``; ``–`` with the mark of its footnote when missing, empty when not asked for."""
    if entry is None:
        return ""
    mark = f" {marks[entry.note]})" if entry.note else ""
    if entry.value is None:
        return DASH + mark + (f" (paper {entry.published:.2f})" if entry.published is not None else "")
    text = number(entry.value)
    if entry.spread is not None:
        text += f" ± {number(entry.spread)}"
    further = [] if entry.gap is None else [f"{entry.gap:+.2f}".replace("-", "−")]
    if entry.published is not None:
        further.append(f"paper {entry.published:.2f}")
    if entry.flags:
        further.append(entry.flags)
    if entry.partial:
        further.append(f"{entry.num_seeds} seeds only")
    return text + (f" ({'; '.join(further)})" if further else "") + mark


def number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.3g}"


def _facts(row: Row) -> list[str]:
    minutes = row.facts["minutes"]
    parameters = "" if row.is_base else f"{row.facts['new_parameters'] / 1e6:.2f}M"
    tokens = "" if row.is_base else f"{row.facts['tokens']:,}"
    return [
        parameters,
        f"{row.facts['cache_bytes'] / 2**20:.1f} MiB",
        tokens,
        "" if minutes is None else f"{minutes:.1f}",
    ]


def _markdown(table: Table) -> str:
    header, body, notes = grid(table)
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
    for plain, written in (("\\", r"\textbackslash "), ("_", r"\_"), ("%", r"\%"), ("&", r"\&"), ("#", r"\#"), ("±", r"$\pm$"),
                           ("↑", r"$\uparrow$"), ("↓", r"$\downarrow$"), ("−", "$-$"), ("–", "--")):  # fmt: skip
        text = text.replace(plain, written)
    return text


def _html(table: Table) -> str:
    header, body, notes = grid(table)
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in body)
    caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<table class="golinear">{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table>\n<ul class="notes">{listed}</ul>\n'


def _json(table: Table) -> str:
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        scores = {
            f"{column.task}/{column.metric}": {k: v for k, v in vars(entry).items() if v not in (None, "", False)}
            | {"value": entry.value}
            for column, entry in row.entries.items()
        }
        rows.append({"base": row.base, "recipe": row.recipe, "is_base": row.is_base, **row.facts, "scores": scores})
    return json.dumps(
        {"title": table.title, "rows": rows, "notes": list(table.notes)}, indent=2, ensure_ascii=False, default=float
    )


def _text(table: Table) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rich_table(table))
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
