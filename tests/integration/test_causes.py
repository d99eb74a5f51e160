"""Failures by cause in real sweeps: what a cell does to its card or to its numbers costs that cell alone."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import sqlalchemy as sa
from prefect import flow
from ray import cloudpickle

from flows import workers
from flows.overhead import TRAIN, Noop, NoopWorker, run_sweep, sweep_of
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


class OutOfMemory(Noop):
    """A card with room for one sequence."""

    def train(self, cell: Any, folder: Any, bench: Any, placement: Any, **more: Any) -> Any:
        import torch

        if placement.micro_batch > 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory with {placement.micro_batch} sequences")
        return super().train(cell, folder, bench, placement, **more)


class SmallCard(NoopWorker):
    def __init__(self, store: Any, placement: Any):
        super().__init__(store, placement)
        workers.stages = OutOfMemory()


def test_out_of_memory_halves_the_micro_batch_each_time(world):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @flow
    def small_card() -> Any:
        return run_sweep(dataclasses.replace(spec, name="small card"), SmallCard).outcomes

    spec = sweep_of(1, dataclasses.replace(TRAIN, batch_size=8), base=world.model)
    key = spec.cells[0].train_key
    assert {outcome.state for outcome in small_card().values()} == {"done"}
    rows = attempts(key)
    assert [(row.state, row.cause) for row in rows] == [("failed", "oom")] * 3 + [("done", "")]
    assert [row.reason.split(" with ")[1] for row in rows[:3]] == ["8 sequences", "4 sequences", "2 sequences"]
    tracked = prepare("orchestration").search(f"tags.train_key = '{key}'")
    assert [entry.info.status for entry in tracked] == ["FINISHED"] + ["FAILED"] * 3
