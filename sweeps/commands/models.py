"""golinear commands on one model, outside any sweep. Each is a plain function of linear_core, given options here."""

from __future__ import annotations

import typer


def add_to(app: typer.Typer) -> None:
    """Nothing yet: the functions land with their parts of linear_core."""
