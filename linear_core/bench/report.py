"""How every benchmark ends: one table on the terminal, the same rows as JSON with what is needed to trust them."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers")


def provenance(device: str) -> dict[str, Any]:
    """Date (UTC), command, device name, thread count and library versions of this process."""
    import torch

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def show(
    title: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    device: str,
    output: str | None = None,
    hidden: Sequence[str] = (),
) -> list[Mapping[str, Any]]:
    """Print rows as a table (their keys but ``hidden`` are the columns) and return them.

    Each is said on standard error, and is in ``output`` (JSON), from the moment that it is measured: a run that is cut
    short has lost none.
    """
    from rich.console import Console
    from rich.table import Table

    about = {"title": title, **provenance(device)}
    done: list[Mapping[str, Any]] = []
    for row in rows:
        done.append(row)
        said = ", ".join(f"{name.replace('_', ' ')} {_cell(row[name])}" for name in row if name not in hidden)
        sys.stderr.write(said + "\n")
        if output:
            Path(output).parent.mkdir(parents=True, exist_ok=True)
            Path(output).write_text(json.dumps({**about, "rows": done}, indent=1) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    table = Table(title=title, title_justify="left", box=None)
    columns = list(dict.fromkeys(column for row in done for column in row if column not in hidden))
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == columns[0] else "right", no_wrap=True)
    for row in done:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)
    return done


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2e}" if value and (abs(value) < 1e-2 or abs(value) >= 1e6) else f"{value:,.2f}"
    return str(value)
