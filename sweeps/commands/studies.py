"""golinear plan, grids, status, logs, forget, retry, diff: what to run, and what came out."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import typer

from sweeps.commands.console import Refused, console, errors, say

if TYPE_CHECKING:
    from sweeps.plan import Plan, PlanItem
    from sweeps.queries import Failure

SWEEP = typer.Argument(None, help="a sweep's name or id; default: the newest")
JSON = typer.Option(False, "--json", help="as JSON")
ACCEPT = typer.Option(
    False, "--accept-base-scores", help="train although a base model's full scores are not the published ones"
)


def add_to(app: typer.Typer) -> None:
    for command in (plan, grids, status, logs, forget, retry, diff):
        app.command()(command)


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of ``request.HELP``, as text; they arrive in its ``**request``."""
    from sweeps.request import HELP

    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    asked = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=Optional[str],  # noqa: UP045 - typer reads this form
            default=typer.Option(None, f"--{name.replace('_', '-')}", help=text),
        )
        for name, text in HELP.items()
    ]  # fmt: skip
    command.__signature__ = inspect.Signature([*own, *asked])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *asked)}
    return command


@with_request
def plan(
    grid: str = typer.Argument("ablation", help="which grid: golinear grids lists them"),
    gpus: float = typer.Option(None, help="GPUs of a cell; default: one where there is one; 0.25: four share a card"),
    machine: str = typer.Option("here", help="plan for another machine, e.g. 8xh200"),
    max_gpu_hours: float = typer.Option(None, help="refuse what would take more"),
    price: float = typer.Option(None, help="of one GPU for an hour, to be told the cost"),
    accept_base_scores: bool = ACCEPT,
    probe: bool = typer.Option(False, "--probe", help="first measure the memory of a training step, once a model and length"),
    json: bool = JSON,
    **request: Any,
) -> None:
    """What a sweep would do, cell by cell, before anything starts: run, resume, skip, wait or refuse."""
    from sweeps.cost import Machine
    from sweeps.parameters import number
    from sweeps.plan import Placement, make_plan
    from sweeps.probe import probe as measure_steps
    from sweeps.request import build
    from sweeps.store import Store
    from sweeps.sweep import pin

    sweep, store = build(grid, **request), Store()
    there = dataclasses.replace(Machine.parse(machine), price=None if price is None else number(price, "price"))
    placement = None if gpus is None else Placement(num_gpus=gpus)
    if probe:
        sweep = pin(sweep)
        measure_steps(sweep, store, there, say)
    made = make_plan(sweep, store, there, placement, max_gpu_hours=max_gpu_hours, accept_base_scores=accept_base_scores)
    if json:
        typer.echo(made.to_json())
    else:
        show_plan(made)
    if made.refusal:
        raise Refused(f"refused: {made.refusal}")


def show_plan(made: Plan) -> None:
    """The plan as a table, with what it adds up to."""
    from rich.table import Table

    colours = {"run": "green", "resume": "cyan", "skip": "dim", "wait": "yellow", "refuse": "red", "pruned": "magenta"}
    rows = Table("cell", "action", "why", "minutes", "GiB", box=None)
    for item in made.items:
        action = f"[{colours[item.action]}]{item.action}[/]"
        busy = item.action in ("run", "resume")
        spent = (f"{item.seconds / 60:.1f}", f"{item.memory / 2**30:.1f}") if busy else ("", "")
        rows.add_row(item.cell.label, action, item.reason, *spent)
    console.print(rows)
    for label, reason in made.sweep.left_out:
        console.print(f"left out: {label}: {reason}", markup=False, style="dim")
    for task, source in zip(made.sweep.tasks, made.sweep.task_sources):
        if source.reason:
            console.print(f"not measured here: {task.label}: {source.reason}", markup=False, style="yellow")
    counts = ", ".join(f"{count} {action}" for action, count in made.counts.items() if count)
    cost = "" if made.cost is None else f", cost {made.cost:.2f}"
    console.print(f"{counts}; about {made.seconds / 60:.0f} min of device time, {made.gpu_hours:.1f} GPU-hours{cost}")


def grids(json: bool = JSON) -> None:
    """The grids: what each shows, how many cells it has, and what it takes on an H200."""
    from rich.table import Table

    from sweeps.cost import Machine
    from sweeps.grids import GRIDS
    from sweeps.plan import gpu_hours
    from sweeps.request import build

    h200 = Machine.parse("1xh200")
    listed: list[dict[str, Any]] = []
    for name, grid in GRIDS.items():
        sweep = build(name)
        hours = round(gpu_hours(sweep, h200), 2)
        shows = (grid.__doc__ or "").splitlines()[0]
        listed.append({"grid": name, "cells": len(sweep.cells), "h200_hours": hours, "models": sweep.bases, "shows": shows})
    if json:
        console.print_json(data=listed)
        return
    rows = Table("grid", "cells", "H200 hours", "shows", box=None)
    for row in listed:
        rows.add_row(row["grid"], str(row["cells"]), f"{row['h200_hours']:.1f}", row["shows"])
    console.print(rows)


def status(
    sweep: str = SWEEP,
    failed: bool = typer.Option(False, "--failed", help="only what failed, with its reason"),
    json: bool = JSON,
) -> None:
    """What is true now: every cell of a sweep, who works on it, what failed and why."""
    from sweeps import flow_runs, queries
    from sweeps.plan import make_plan
    from sweeps.store import Store

    store = Store()
    sweep_id, spec = queries.load_sweep(store, sweep)
    state = queries.sweep_state(store, sweep_id)
    if state in flow_runs.ACTIVE and sweep_id not in flow_runs.live_sweeps(store):
        state += ", but no flow is at work on it"
    made = make_plan(spec, store)
    found = {failure.key: failure for failure in queries.failures(store) if failure.state != "pruned"}
    rows = [_status_row(item, found.get(item.key)) for item in made.items if not failed or item.key in found]
    if json:
        console.print_json(data={"sweep": sweep_id, "state": state, "counts": made.counts, "cells": rows})
        return
    counts = Counter(row["state"] for row in rows)
    console.print(f"{sweep_id}: {state}; {', '.join(f'{n} {word}' for word, n in counts.items())}", highlight=False)
    for row in rows:
        text = f"  {row['state']:8} {row['label']:40} {row['key']}  {row['why']}".rstrip()
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _status_row(item: PlanItem, failure: Failure | None) -> dict[str, Any]:
    """A cell as status shows it: the plan's item with its state in a word, and why."""
    words = {"skip": "done", "run": "to do", "resume": "stopped", "wait": "running", "refuse": "refused"}
    state = words.get(item.action, item.action)
    why = "" if item.action == "skip" else item.reason
    if failure is not None and item.action in ("run", "resume", "refuse"):
        state = "stopped" if failure.cause in ("preempted", "cancelled") else "failed"
        why = f"{failure.cause}: {failure.reason}"
    return {**item.to_dict(), "state": state, "why": why, "cause": failure.cause if failure else ""}


def logs(cell: str = typer.Argument(help="a cell's key, its beginning, or its last 16 characters")) -> None:
    """Why a cell failed: reason, end of its log and traceback of its newest failed attempt."""
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    found = queries.failures(store, queries.find_key(store, cell))
    if not found:
        console.print("no failed attempt", highlight=False)
        return
    newest = found[0]
    say(f"{newest.key} attempt {newest.attempt} {newest.state}: {newest.cause}: {newest.reason}")
    for title, text in (("end of its log", newest.log_tail), ("traceback", newest.traceback)):
        if text:
            errors.rule(title)
            typer.echo(text)


def forget(cell: str = typer.Argument(help="as in golinear logs")) -> None:
    """Drop one cell's result, scores and checkpoints, so that it alone runs again."""
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    key = queries.find_key(store, cell)
    attempts = queries.forget(store, key)
    console.print(f"forgot {key} ({attempts} attempts); the next run of its sweep computes it again", highlight=False)


CELLS = typer.Argument(None, help="as in golinear logs; default: all that failed")


def retry(cells: list[str] = CELLS) -> None:
    """Let failed cells run again: their failures stop counting."""
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    keys = [queries.find_key(store, cell) for cell in cells] if cells else None
    console.print(f"{queries.retry(store, keys)} failures set aside; run the sweep again", highlight=False)


def diff(
    first: str = typer.Argument(help="a cell's key of the store, as in golinear logs"),
    second: str = typer.Argument(help="the other one"),
) -> None:
    """What differs between two cells, a line each; then their scores, and whether those differ by more than chance."""
    from rich.table import Table

    from sweeps import cell, compare, queries
    from sweeps.store import Store
    from sweeps.views import number, signed

    store = Store()
    keys = [queries.find_key(store, text) for text in (first, second)]
    known = {
        c.train_key: c for entry in queries.list_sweeps(store) for c in queries.load_sweep(store, entry["id"])[1].cells
    }
    if absent := [key for key in keys if key not in known]:
        raise ValueError(f"{', '.join(absent)} belongs to no sweep of this store")
    for line in cell.diff(known[keys[0]], known[keys[1]]) or ["the same cell"]:
        console.print(line, highlight=False, markup=False)
    rows = Table("score", "first", "second", "difference", "95 % interval", "p", "", "judged by", box=None)
    for column, a, b, found in compare.of_cells(*(queries.scores_of(store, [key]) for key in keys)):
        interval = "" if found.low is None or found.high is None else f"{signed(found.low)} to {signed(found.high)}"
        verdict = ("", "") if found.p is None else (f"{found.p:.2g}", "real" if found.real else "may be chance")
        values = (number(a * column.scale), number(b * column.scale), signed(found.value))
        rows.add_row(f"{column.spec.label} {column.metric}", *values, interval, *verdict, found.method)
    if rows.row_count:
        console.print(rows)
