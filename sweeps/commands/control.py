"""golinear cancel, pause, drain, resume, priority, gc: steering a sweep that runs, and freeing what nothing needs."""

from __future__ import annotations

import getpass
import socket

import typer

from sweeps.commands.console import console

SWEEP = typer.Argument(help="a sweep's name or id, as in golinear status")


def add_to(app: typer.Typer) -> None:
    for command in (cancel, pause, drain, resume, priority, gc):
        app.command()(command)


def cancel(name: str = typer.Argument(help="a sweep's name or id, or a cell's key, its beginning or last 16")) -> None:
    """Stop a sweep, or one cell. Checkpoints stay; a cancelled cell runs again after golinear retry."""
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    if any(name in (entry["id"], entry["name"]) for entry in queries.list_sweeps(store)):
        _set(name, "cancelled", "its running cells stop and are saved; golinear run goes on with them")
        return
    key = queries.find_key(store, name)
    busy = queries.cancel(store, key, f"{getpass.getuser()}@{socket.gethostname()}")
    console.print(f"cancelled {key}: {'it stops within seconds' if busy else 'nobody was at work on it'}", highlight=False)


def pause(sweep: str = SWEEP) -> None:
    """Start no more cells of a sweep until golinear resume; those that run are finished."""
    _set(sweep, "paused", "running cells are finished; golinear resume goes on")


def drain(sweep: str = SWEEP) -> None:
    """Finish the running cells of a sweep and then end its flow."""
    _set(sweep, "draining", "running cells are finished, then the flow ends")


def resume(sweep: str = SWEEP) -> None:
    """Go on with a paused sweep."""
    _set(sweep, "running", "its flow takes the next cell within seconds")


def priority(
    name: str = typer.Argument(help="a sweep's name or id, or a cell's key, its beginning or last 16"),
    value: float = typer.Argument(help="higher goes first; everything has 0 until told otherwise"),
) -> None:
    """Put a sweep or a cell before the others (behind them: golinear priority NAME -- -1)."""
    from sweeps import priorities, queries
    from sweeps.store import Store

    store = Store()
    if any(name in (entry["id"], entry["name"]) for entry in queries.list_sweeps(store)):
        key, _ = queries.load_sweep(store, name)
    else:
        key = queries.find_key(store, name, planned=True)
    priorities.put(store, key, value)
    console.print(f"{key}: priority {value:g}", highlight=False)


def _set(sweep: str, state: str, then: str) -> None:
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    sweep_id, _ = queries.load_sweep(store, sweep)
    queries.set_sweep_state(store, sweep_id, state)
    console.print(f"{sweep_id}: {state}; {then}", highlight=False)


def gc(dry_run: bool = typer.Option(False, "--dry-run", help="only say what would go")) -> None:
    """Remove checkpoints of finished cells and attempts that came to nothing; results, scores and logs stay."""
    from sweeps import housekeeping
    from sweeps.store import Store

    found = housekeeping.leftovers(Store())
    for leftover in found:
        console.print(f"{leftover.num_bytes / 2**20:9.1f} MiB  {leftover.why}: {leftover.path}", highlight=False, soft_wrap=True)
    total = sum(leftover.num_bytes for leftover in found) if dry_run else housekeeping.remove(found)
    console.print(f"{total / 2**20:9.1f} MiB  in all, {'would be freed' if dry_run else 'freed'}", highlight=False)
