"""A cell on two GPUs, with two processes on the CPU in their place: through the real flow, and when one of them dies."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import time
from threading import Event
from typing import Any

import pytest

from flows.slots import Slot, StageFailed
from linear_core.evaluate.scores import TaskSpec
from sweeps import stages
from sweeps.cell import Placement
from sweeps.cost import Machine
from sweeps.request import build
from sweeps.store import Store, new_holder
from sweeps.sweep import pin
from tests.integration.test_sweep import request, run

pytestmark = [pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]
TWO = Placement(num_gpus=2, num_cpus=2, device="cpu")


def the_cell(asked: dict[str, Any]) -> Any:
    return pin(build(**{name: value for name, value in asked.items() if name != "gpus"})).cells[1]


def places_left() -> list[str]:
    from ray.util.placement_group import placement_group_table  # Ray reads the environment when it is imported

    return [group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_a_cell_of_two_ranks_through_the_flow(world, monkeypatch, tmp_path):
    monkeypatch.setattr("flows.sweep.Placement", functools.partial(Placement, device="cpu"))
    here = dataclasses.replace(Machine.detect(), num_gpus=2, gpu="stand-in")
    monkeypatch.setattr("flows.sweep._machine", lambda capacity: here)
    asked = request(world, "ranks", recipes="gdn 4+2", seeds=11, tokens=640, gpus=2)
    state = run(**asked)
    assert state.is_completed(), state.message
    assert not places_left()

    store, cell = Store(), the_cell(asked)
    folder = store.published_folder(cell.train_key)
    found = json.loads((folder / "provenance.json").read_text())
    assert found["training"]["ranks"] == 2 and found["training"]["micro_batch"] == 1
    assert (folder / "log-rank1.txt").exists(), "the other rank was at work"
    bench = stages.Bench("cpu")
    alone = stages.train(cell, tmp_path, bench)
    assert alone["training"]["loss"] == pytest.approx(found["training"]["loss"], rel=1e-4)
    tasks = [TaskSpec(name="perplexity", limit=512), TaskSpec(name="agreement", limit=256)]
    scores, failed = stages.evaluate(cell, tmp_path, bench, tasks)
    assert not failed
    for score in scores:
        theirs = json.loads(next((folder / "scores").glob(f"{score.task.name}*.json")).read_text())
        (same,) = [one for one in theirs if one["metric"] == score.metric]
        assert same["value"] == pytest.approx(score.value, rel=1e-3, abs=1e-4) and same["samples"] == score.samples


def test_an_uneven_batch_is_refused_before_anything_starts(world, monkeypatch):
    monkeypatch.setattr("flows.sweep._machine", lambda capacity: dataclasses.replace(Machine.detect(), num_gpus=2))
    with pytest.raises(ValueError, match="batch_size 3 cannot be shared by 2 GPUs"):
        run(**request(world, "uneven ranks", batch_size=3, gpus=2)).result()


@pytest.mark.faults
def test_a_killed_rank_ends_its_group_and_is_named(world):
    asked = request(world, "killed rank", recipes="gdn 4+2", seeds=12, tokens=131072)
    store, cell = Store(), the_cell(asked)
    claim = store.claim(cell.train_key, new_holder())
    slot = Slot(store, TWO)
    try:
        slot.start(cell.base, Event())
        slot.call("convert", cell, claim)
        log = store.folder(claim) / "log-rank1.txt"
        pids = [int(re.search(r"in process (\d+)", path.read_text())[1]) for path in (log.with_name("log.txt"), log)]
        killed_at = []

        def kill(said: dict[str, Any]) -> None:
            if said.get("rows") and not killed_at:
                os.kill(pids[1], signal.SIGKILL)
                killed_at.append(time.monotonic())

        with pytest.raises(StageFailed, match=r"rank 1 of 2: the worker process died during train") as failed:
            slot.call("train", cell, claim, None, on_progress=kill)
        assert time.monotonic() - killed_at[0] < 60 and failed.value.cause == "crash"
        wait_until(lambda: not places_left() and not any(map(alive, pids)))
        import ray

        wait_until(lambda: ray.available_resources().get("GPU") == 2)  # Ray counts them back a moment later
    finally:
        slot.close()


@pytest.mark.faults
def test_a_rank_that_fails_is_named_and_the_other_does_not_wait_for_ever(world):
    """Rank 1 cannot write its log: an error of its own, while rank 0 waits for it."""
    asked = request(world, "failing rank", recipes="gdn 4+2", seeds=13)
    store, cell = Store(), the_cell(asked)
    claim = store.claim(cell.train_key, new_holder())
    slot = Slot(store, TWO)
    try:
        slot.start(cell.base, Event())
        (store.folder(claim) / "log-rank1.txt").mkdir(parents=True)
        started = time.monotonic()
        with pytest.raises(StageFailed, match=r"rank 1 of 2: .*log-rank1.txt") as failed:
            slot.call("train", cell, claim, None)
        assert time.monotonic() - started < 60 and failed.value.cause == "error"
        wait_until(lambda: not places_left())
    finally:
        slot.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
