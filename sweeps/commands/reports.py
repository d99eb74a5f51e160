"""golinear table, report, figures: what came out of a sweep, from the store or from an exported file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sweeps.commands.console import say

if TYPE_CHECKING:
    from sweeps.study import Study

OUT = typer.Option(..., "-o", "--out", help="folder to write")
FILE = typer.Option(None, "-o", "--out", help="a file to write, instead of standard output")
SWEEP = typer.Argument(None, help="a sweep's name or id; default: the newest")
FROM = typer.Option([], "--from", help="instead of the store: a file of golinear table --format json (several: joined)")


def add_to(app: typer.Typer) -> None:
    for command in (table, report, figures):
        app.command()(command)


def opened(sweep: str | None, files: list[Path]) -> Study:
    """The study asked for. Raises ValueError when both a sweep and files are given, and as reading them does."""
    from sweeps import study
    from sweeps.store import Store

    if not files:
        return study.from_store(Store(), sweep)
    if sweep:
        raise ValueError(f"give a sweep of the store or --from FILE, not both ({sweep} and {files[0]})")
    return study.read(files)


def table(
    sweep: str = SWEEP,
    format: str = typer.Option("text", help="text, markdown, csv, latex, html, json (json: everything, for --from)"),
    view: str = typer.Option("summary", help="summary, scores, gaps, kept, published, wins, seeds, cost"),
    files: list[Path] = FROM,
    out: Path = FILE,
) -> None:
    """The scaling table of a sweep: base model and cells, gap to base, cost; built from the store alone."""
    from sweeps import render, study

    found = opened(sweep, files)
    if format == "json" and view == "summary":
        text = study.to_json(found)
    else:
        whole = format == "csv" and view == "summary"
        text = render.render(found.data if whole else found.table(), format, show=view)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(out)


def report(sweep: str = SWEEP, out: Path = OUT, files: list[Path] = FROM) -> None:
    """One HTML file that says what came out: words, tables, figures, settings, provenance, what failed."""
    from sweeps.report import write

    typer.echo(write(opened(sweep, files), out))


def figures(sweep: str = SWEEP, out: Path = OUT, files: list[Path] = FROM) -> None:
    """Every figure of a sweep as SVG and PNG; says what could not be drawn and why."""
    from sweeps.figures import write

    made, lacking = write(opened(sweep, files), out)
    for path in made:
        typer.echo(path)
    for drawing in lacking:
        say(f"not drawn: {drawing.title}: {'; '.join(drawing.lacks)}")
