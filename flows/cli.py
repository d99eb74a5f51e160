"""The console script `golinear`: the commands of sweeps.cli, and `run`, which needs the flow."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import typer

from sweeps.cli import app, main
from sweeps.commands.console import Refused, console
from sweeps.commands.models import MORE_BENCHES
from sweeps.commands.studies import ACCEPT, with_request

__all__ = ["main"]


def _orchestration(arguments: list[str]) -> int:
    """In a home of its own; what Prefect reads from the environment is there before it is imported."""
    from sweeps import services

    server = services.urls().get("prefect", "")
    with tempfile.TemporaryDirectory(prefix="golinear-overhead-", ignore_cleanup_errors=True) as home:
        os.environ["GOLINEAR_HOME"] = home
        for name in ("GOLINEAR_DATABASE_URL", "GOLINEAR_BLOBS", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)
        os.environ.update(services.environment(server))
        from flows.overhead import main as measure

        return measure(arguments)


MORE_BENCHES["orchestration"] = _orchestration


@app.command()
@with_request
def run(
    grid: str = typer.Argument("ablation", help="which grid: golinear grids lists them"),
    gpus: float = typer.Option(None, help="GPUs of a cell; default: one where there is one; 0.25: four share a card"),
    workers: int = typer.Option(None, help="cells at work at a time; default: one a GPU, or one"),
    checkpoint_minutes: float = typer.Option(None, help="between checkpoints; default: 2, on a CPU 0.25"),
    max_gpu_hours: float = typer.Option(None, help="refuse what would take more"),
    cells_per_pass: int = typer.Option(1, help="cells of a base model that train over the same batches at a time"),
    fail_fast: bool = typer.Option(False, "--fail-fast", help="start no further cell after a failure"),
    prune: float = typer.Option(None, help="end a cell early whose loss is over so many times its best, e.g. 1.5"),
    priority: float = typer.Option(None, help="of the sweep: higher goes first; default 0"),
    accept_base_scores: bool = ACCEPT,
    **request: Any,
) -> None:
    """Run a sweep in this process: the same flow as `prefect deployment run sweep/ablation`."""
    from linear_core import smollm2
    from sweeps import request as requests
    from sweeps import services

    wanted = requests.build(grid, **request)  # what is wrong is said before anything starts
    if smollm2.NAME in wanted.bases:
        services.ensure_smollm2(lambda line: console.print(line, highlight=False))
    os.environ.update(services.environment(services.urls().get("prefect", "")))
    from flows.sweep import sweep

    limits = {
        "gpus": gpus,
        "workers": workers,
        "checkpoint_minutes": checkpoint_minutes,
        "max_gpu_hours": max_gpu_hours,
        "prune": prune,
        "priority": priority,
        "cells_per_pass": cells_per_pass,
    }
    state = sweep(grid, **request, **limits, fail_fast=fail_fast, accept_base_scores=accept_base_scores, return_state=True)
    if not state.is_completed():
        raise Refused(state.message)
    console.print(state.message, highlight=False)


@app.command()
def watch(
    source: str = typer.Option("hub", help="hub, or a folder of model folders"),
    organisations: str = typer.Option("Qwen,meta-llama,HuggingFaceTB", help="whose models, on the hub"),
    names: str = typer.Option("*", help="shell patterns of their names, e.g. Qwen3-*-Base"),
    licences: str = typer.Option("apache-2.0,mit,llama3.1", help="that are allowed; any: all"),
    min_parameters: str = typer.Option("100M", help="of a model"),
    max_parameters: str = typer.Option("9B", help="of a model"),
    max_age_days: int = typer.Option(90, help="since it was made; 0: any age"),
    at_most: int = typer.Option(1, help="models to start"),
    deployment: str = typer.Option("sweep/ablation", help="what is started for each"),
    dry_run: bool = typer.Option(False, "--dry-run", help="list them with why and why not; start nothing"),
) -> None:
    """Look for new base models and start a sweep of each: the flow of `prefect deployment run new-models/watch`."""
    from sweeps import services

    options = {name: value for name, value in locals().items() if name != "services"}
    if not (server := services.urls().get("prefect", "")):
        raise Refused("Prefect does not run here; golinear up starts it")
    os.environ.update(services.environment(server))
    from flows.new_models import new_models

    state = new_models(**options, return_state=True)
    if not state.is_completed():
        raise Refused(state.message)
    console.print(state.message, highlight=False)


if __name__ == "__main__":
    main()
