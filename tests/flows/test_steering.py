"""Pause, drain and cancel: what a running flow sees of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from flows.runner import Runner
from sweeps import queries
from sweeps.cell import Placement
from sweeps.cost import Machine
from sweeps.store import Store
from sweeps.sweep import Sweep


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    store, sweep = Store(f"sqlite:///{tmp_path}/store.db"), Sweep(name="study", cells=())
    queries.save_sweep(store, "study-1", sweep)
    absent: Any = None  # no cell runs here, so nothing is tracked
    return Runner(
        sweep=sweep, sweep_id="study-1", store=store, tracker=absent, parent="", machine=Machine(), placement=Placement(),
        num_slots=1, say=print, links={},
    )  # fmt: skip


def test_a_paused_sweep_waits_and_goes_on(runner: Runner) -> None:
    assert runner.may_start()
    queries.set_sweep_state(runner.store, "study-1", "paused")
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(runner.may_start()))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    queries.set_sweep_state(runner.store, "study-1", "running")
    waiting.join(10)
    assert answers == [True]


@pytest.mark.parametrize("state", ["draining", "cancelled"])
def test_a_draining_or_cancelled_sweep_starts_nothing(runner: Runner, state: str) -> None:
    queries.set_sweep_state(runner.store, "study-1", state)
    assert not runner.may_start()
    assert runner.cancelled() == (state == "cancelled") == runner.stop.is_set()
