"""Failures by cause in real sweeps: what a cell does to its card or to its numbers costs that cell alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import sqlalchemy as sa
from prefect import flow

from sweeps import queries, schema
from sweeps.store import Store
from sweeps.tracking import prepare
from tests.integration.test_sweep import cells, request, run, runs

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]


def attempts(key: str) -> list[Any]:
    table = schema.attempts
    return Store().read(sa.select(table).where(table.c.key == key).order_by(table.c.id))


def test_numbers_that_are_not_finite_stop_their_cell_for_good(world):
    asked = request(world, "nonfinite", recipes="gdn 4+2 lora,gla 4+0", seeds=41, learning_rate=1e30, tokens=1024)
    state = run(**asked)
    assert state.is_failed() and "gdn 4+2 lora" in state.message and "nonfinite" in state.message, state.message
    item = cells("nonfinite")["gdn 4+2 lora"]
    assert [(row.state, row.cause) for row in attempts(item.key)] == [("failed", "nonfinite")]
    assert item.action == "refuse" and "golinear retry" in item.reason
    assert not queries.scores_of(Store(), [item.key]), "no score of a model that is not one"
    assert {entry.info.status for entry in runs("nonfinite")["gdn"]} == {"FAILED"}


def test_out_of_memory_halves_the_micro_batch_each_time(world):
    from ray import cloudpickle  # Ray is not imported before its settings are made

    from flows.overhead import TRAIN, run_sweep, sweep_of
    from tests.integration import small_card

    cloudpickle.register_pickle_by_value(small_card)

    @flow
    def on_a_small_card() -> Any:
        return run_sweep(dataclasses.replace(spec, name="small card"), small_card.SmallCard).outcomes

    spec = sweep_of(1, dataclasses.replace(TRAIN, batch_size=8), base=world.model)
    key = spec.cells[0].train_key
    assert {outcome.state for outcome in on_a_small_card().values()} == {"done"}
    rows = attempts(key)
    assert [(row.state, row.cause) for row in rows] == [("failed", "oom")] * 3 + [("done", "")]
    assert [row.reason.split(" with ")[1] for row in rows[:3]] == ["8 sequences", "4 sequences", "2 sequences"]
    tracked = prepare("orchestration").search(f"tags.train_key = '{key}'")
    assert [entry.info.status for entry in tracked] == ["FINISHED"] + ["FAILED"] * 3
