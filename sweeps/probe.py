"""One measured training step per base model and sequence length, in a process of its own, kept for all later plans."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from sweeps import cost, queries
from sweeps.cell import Cell
from sweeps.cost import Machine
from sweeps.store import Store
from sweeps.sweep import Sweep


def probe(sweep: Sweep, store: Store, machine: Machine, say: Callable[[str], None] = lambda _: None) -> int:
    """Measure what is not measured yet, with the recipe that adds the most parameters. Returns the number of steps made.

    A step that fails, by lack of memory or otherwise, is said and leaves the estimate. Nothing is measured for a machine
    elsewhere: ValueError.
    """
    if not machine.is_here:
        raise ValueError("probe measures on this machine; leave out machine, or plan without probe")
    known = queries.measurements(store)
    wanted: dict[str, Cell] = {}
    for cell in sweep.cells:
        if cell.train is not None:
            name = cost.step_bytes_name(machine, cell)
            if name not in known and (name not in wanted or _size(cell) > _size(wanted[name])):
                wanted[name] = cell
    for name, cell in wanted.items():
        say(f"measuring a training step of {cell.base_label}, {_length(cell):,} tokens ({cell.recipe.name})")
        try:
            queries.measure(store, name, float(_measure(cell, machine)))
        except RuntimeError as error:
            say(f"{cell.base_label}: not measured, the estimate stands: {error}")
    return len(wanted)


def _length(cell: Cell) -> int:
    return cell.train.sequence_length if cell.train else 0


def _size(cell: Cell) -> int:
    from linear_core.models import resolve

    return cost.new_parameters(resolve(cell.base).shape, cell.recipe)


def _measure(cell: Cell, machine: Machine) -> int:
    """Raises RuntimeError with the end of what the process said."""
    device = "cuda" if machine.num_gpus else "cpu"
    command = [
        sys.executable, "-m", "linear_core.bench.memory", "--model", cell.base, "--recipe", cell.recipe.name,
        "--sequence-length", str(_length(cell)), "--device", device,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])["step_bytes"]
