"""Fills in what the code knows when the site is built: commands, grids, measured results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_config(config: Any) -> Any:
    """The navigation ends with what is under results/."""
    config.nav.append({"Results": [f"results/{page.name}" for page in _results()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    for page in _results():
        files.append(File.generated(config, f"results/{page.name}", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for marker, write in (("<!-- grids -->", _grids), ("<!-- commands -->", _commands)):
        if marker in markdown:
            markdown = markdown.replace(marker, write())
    return markdown


def _results() -> list[Path]:
    return sorted((ROOT / "results").glob("*.md"))


def _grids() -> str:
    from sweeps.cost import Machine
    from sweeps.grids import GRIDS
    from sweeps.plan import gpu_hours
    from sweeps.request import build

    rows = ["| `golinear run …` | cells | H200 hours | shows |", "|---|--:|--:|---|"]
    for name, grid in GRIDS.items():
        sweep = build(name)
        hours = gpu_hours(sweep, Machine.parse("1xh200"))
        shows = (grid.__doc__ or "").splitlines()[0]
        rows.append(f"| `{name}` | {len(sweep.cells)} | {hours:.1f} | {shows} |")
    return "\n".join(rows)


def _commands() -> str:
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from flows.cli import app

    command = get_command(app)
    written = get_docs_for_click(obj=command, ctx=typer.Context(command), name="golinear")
    lines = written.splitlines()[1:]  # the page has its own heading
    # name[@length][:limit] is no link; lines with a dollar are code
    return "\n".join(line if line.startswith("$") else re.sub(r"\](\s?)\[", r"]\1\[", line) for line in lines)
