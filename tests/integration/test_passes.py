"""Cells that train in one pass: each has its own claim, records and end, whatever becomes of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file

from sweeps import queries, schema, stages
from sweeps.commands import control
from sweeps.store import Store
from tests.integration.test_faults import child
from tests.integration.test_steering import nothing_left_behind, steer  # noqa: F401 - fixtures
from tests.integration.test_sweep import cells, request, run, runs
from tests.integration.world import break_cell

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]
PAIR = ("gla 4+2", "gdn 4+2")
LONG = {"recipes": ",".join(PAIR), "tokens": 32_768, "checkpoint_minutes": 0.01, "cells_per_pass": 2}


def attempts(key: str) -> list[Any]:
    table = schema.attempts
    return Store().read(sa.select(table).where(table.c.key == key).order_by(table.c.id))


def ends(name: str) -> dict[str, list[tuple[str, str]]]:
    """State and cause of the attempts at each trained cell, oldest first."""
    items = {recipe: item for recipe, item in cells(name).items() if recipe != "base"}
    return {recipe: [(row.state, row.cause) for row in attempts(item.key)] for recipe, item in items.items()}


def training(name: str, recipe: str) -> dict[str, Any]:
    """What the published training of a cell says of itself."""
    folder = Store().published_folder(cells(name)[recipe].key)
    return json.loads((folder / "provenance.json").read_text())["training"]


def at_work(name: str) -> bool:
    """Whether two cells train and have a checkpoint each."""
    try:
        _, sweep = queries.load_sweep(Store(), name)
    except ValueError:
        return False
    rows = [row for cell in sweep.cells if not cell.is_base for row in attempts(cell.train_key)]
    return sum(row.state == "running" and bool(row.tokens) for row in rows) == 2


def wait_for(name: str) -> None:
    from tests.integration.test_faults import until

    until(lambda: at_work(name), 100)


def test_a_cell_that_diverges_and_one_that_cannot_be_written_cost_themselves(world, tmp_path):
    asked = request(world, "pass", recipes="gdn 4+2 lora,gla 4+0,gdn 4+2", seeds=61, learning_rate=1e30, tokens=1024)
    state = run(**asked, cells_per_pass=3)
    assert state.is_failed() and "1 of 4 cells" in state.message, state.message
    done = {"gdn 4+2 lora": [("failed", "nonfinite")], "gla 4+0": [("done", "")], "gdn 4+2": [("done", "")]}
    assert ends("pass") == done and training("pass", "gdn 4+2")["cells"] == 3
    failure = queries.failures(Store(), cells("pass")["gdn 4+2 lora"].key)[0]
    assert "in _ended" in failure.traceback and "gdn 4+2 lora" in failure.log_tail

    tracked = {entry.info.run_name.partition(" ")[2]: entry for entries in runs("pass").values() for entry in entries}
    assert {name: entry.info.status for name, entry in tracked.items()} == {
        "base": "FINISHED", "gdn 4+2 lora s61": "FAILED", "gla 4+0 s61": "FINISHED", "gdn 4+2 s61": "FINISHED",
    }  # fmt: skip
    assert {"eval/perplexity", "gap/perplexity", "train/loss"} <= set(tracked["gdn 4+2 s61"].data.metrics)
    assert tracked["gdn 4+2 lora s61"].data.tags["reason"].startswith("nonfinite: ")
    for recipe in ("gla 4+0", "gdn 4+2"):
        cell = cells("pass")[recipe].cell
        stages.train(cell, tmp_path / recipe, stages.Bench(source="auto"))
        one, other = (
            load_file(folder / stages.PARAMETERS)
            for folder in (tmp_path / recipe, Store().published_folder(cell.train_key))
        )
        assert all(torch.equal(one[tensor], other[tensor]) for tensor in one | other), "as alone, to the bit"

    more = {**asked, "recipes": f"{asked['recipes']},kgla 4+0,hedgehog 4+0"}
    broken = break_cell(more, "kgla")
    assert "2 of 6 cells" in run(**more, cells_per_pass=3).message
    assert ends("pass") == {**done, "kgla 4+0": [("failed", "error")], "hedgehog 4+0": [("done", "")]}
    assert "save_new_parameters" in queries.failures(Store(), broken)[0].traceback
    assert training("pass", "hedgehog 4+0")["cells"] == 1, "once more by itself, from its last checkpoint"
    assert training("pass", "hedgehog 4+0")["resumed_from"] == 8


def test_a_killed_pass_goes_on_together_in_the_same_flow(world, steer):  # noqa: F811
    def a_fault() -> None:
        wait_for("killed pass")
        child(None, "ray::Worker").kill()

    fault = steer(a_fault)
    state = run(**request(world, "killed pass", seeds=62, **LONG))
    fault.result()
    assert state.is_completed(), state.message
    assert ends("killed pass") == {cell: [("failed", "crash"), ("done", "")] for cell in PAIR}
    for recipe in PAIR:
        found = training("killed pass", recipe)
        assert found["cells"] == 2 and found["resumed_from"] > 0
    assert {e.info.status for e in runs("killed pass")["gdn"]} == {"FAILED", "FINISHED"}


def test_a_cancelled_cell_leaves_the_pass_and_a_cancelled_sweep_ends_it(world, steer, monkeypatch):  # noqa: F811
    monkeypatch.setattr("flows.runner.ASK_SECONDS", 0.2)
    asked = request(world, "left pass", seeds=63, **LONG)

    def a_person() -> None:
        wait_for("left pass")
        control.cancel(cells("left pass")["gla 4+2"].key)

    person = steer(a_person)
    state = run(**asked)
    person.result()
    assert "1 of 3 cells are not done" in state.message and "cancelled by" in state.message, state.message
    assert ends("left pass") == {"gla 4+2": [("cancelled", "cancelled")], "gdn 4+2": [("done", "")]}
    assert [runs("left pass")[m][0].info.status for m in ("gla", "gdn")] == ["KILLED", "FINISHED"]
    assert training("left pass", "gdn 4+2")["cells"] == 2

    def another() -> None:
        wait_for("ended pass")
        control.cancel("ended pass")

    asked = request(world, "ended pass", seeds=64, **LONG)
    person = steer(another)
    state = run(**asked)
    person.result()
    assert state.is_cancelled() and ends("ended pass") == {cell: [("failed", "preempted")] for cell in PAIR}
    assert {item.action for name, item in cells("ended pass").items() if name != "base"} == {"resume"}
    assert run(**asked).is_completed()
    assert training("ended pass", "gla 4+2")["resumed_from"] and training("ended pass", "gdn 4+2")["cells"] == 2
