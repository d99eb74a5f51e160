"""Pause, resume, cancel, drain, prune and priorities on real sweeps; afterwards nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import sqlalchemy as sa

from sweeps import queries, schema
from sweeps.commands import control
from sweeps.plan import make_plan
from sweeps.store import Store
from sweeps.tracking import prepare
from tests.integration.test_sweep import request, run

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]


class Watched:
    """A sweep of gdn cells by seed, as the store has it."""

    def __init__(self, name: str):
        self.name, self.store = name, Store()

    def items(self) -> dict[int, Any]:
        made = make_plan(queries.load_sweep(self.store, self.name)[1], self.store)
        return {item.cell.seed: item for item in made.items if not item.cell.is_base}

    def states(self) -> dict[int, list[str]]:
        try:
            _, sweep = queries.load_sweep(self.store, self.name)
        except ValueError:
            return {}
        seeds = {cell.train_key: cell.seed for cell in sweep.cells if not cell.is_base}
        found: dict[int, list[str]] = {}
        for row in self.store.read(sa.select(schema.attempts).order_by(schema.attempts.c.id)):
            if row.key in seeds:
                found.setdefault(seeds[row.key], []).append("training" if row.tokens and row.state == "running" else row.state)
        return found

    def until(self, condition: Callable[[dict[int, list[str]]], Any], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition(states := self.states()):
            assert time.monotonic() < end, f"not within {seconds} s: {states}"
            time.sleep(0.05)


@pytest.fixture
def steer() -> Iterator[Callable[[Callable[[], None]], Any]]:
    """Runs what a person does meanwhile, in a thread; its failure fails the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def under_way() -> set[tuple[str, str]]:
    """Live claims, running attempts and RUNNING records."""
    store = Store()
    claims = store.read(sa.select(schema.claims.c.key).where(schema.claims.c.expires_at > store.now))
    attempts = store.read(sa.select(schema.attempts.c.key).where(schema.attempts.c.state == "running"))
    records = prepare("ablation").search("attributes.status = 'RUNNING'")
    found = [("claim", row.key) for row in claims] + [("attempt", row.key) for row in attempts]
    return {*found, *(("record", run.info.run_id) for run in records)}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = under_way()  # tests that kill what they started share this store
    yield
    assert under_way() <= before
    left = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Worker")]
    assert not psutil.wait_procs(left, timeout=10)[1]


def test_pause_resume_cancel_a_cell_and_drain_then_cancel_the_sweep(world, steer, monkeypatch):
    monkeypatch.setattr("flows.runner.ASK_SECONDS", 0.2)  # these cells train for a second or two
    asked = request(world, "steered", recipes="gdn 4+2", seeds="31,32,33,34", tokens=16384, checkpoint_minutes=0.005)
    sweep = Watched("steered")

    def a_person() -> None:
        sweep.until(lambda s: 31 in s)
        control.pause("steered")
        sweep.until(lambda s: s[31] == ["done"])
        time.sleep(3)
        assert set(sweep.states()) == {31}, "paused: the running cell is finished, none is started"
        control.resume("steered")
        sweep.until(lambda s: s.get(32) == ["training"])
        control.cancel(sweep.items()[32].key)
        sweep.until(lambda s: s.get(33) == ["training"])
        control.drain("steered")

    person = steer(a_person)
    state = run(**asked)
    person.result()
    assert state.is_cancelled() and "drained" in state.message and "gdn 4+2 s34" in state.message, state.message
    assert sweep.states() == {31: ["done"], 32: ["cancelled"], 33: ["done"]}
    assert "cancelled by" in state.message, "the cancelled cell is named with who did it"

    def another() -> None:
        sweep.until(lambda s: s.get(34) == ["training"])
        control.cancel("steered")

    person = steer(another)
    state = run(**asked)
    person.result()
    assert state.is_cancelled() and "a person cancelled the sweep" in state.message
    assert sweep.states()[34] == ["failed"] and sweep.items()[34].action != "skip"
    (parent,) = prepare("ablation").search("tags.kind = 'sweep' and attributes.run_name LIKE 'steered%'")
    assert parent.info.status == "KILLED"

    queries.retry(sweep.store)
    assert run(**asked).is_completed()
    assert {seed: states[-1] for seed, states in sweep.states().items()} == dict.fromkeys((31, 32, 33, 34), "done")


def test_a_diverged_cell_is_pruned_neither_failed_nor_done(world):
    asked = request(world, "pruned", recipes="gdn 4+2", seeds=35, tokens=65536, checkpoint_minutes=0.005)
    sweep = Watched("pruned")
    state = run(**asked, prune=1.0001)  # so near its best that chance alone exceeds it
    assert state.is_completed() and state.name == "Pruned" and "1 pruned as asked" in state.message, state.message
    item = sweep.items()[35]
    assert sweep.states() == {35: ["pruned"]} and item.action == "pruned" and "times its best" in item.reason
    (tracked,) = prepare("ablation").search(f"tags.train_key = '{item.key}'")
    assert tracked.info.status == "KILLED" and tracked.data.tags["reason"].startswith("pruned: loss")
    assert run(**asked).name == "Pruned", "it stays so until somebody asks for another try"
    queries.retry(sweep.store, [item.key])
    assert sweep.items()[35].action == "resume"
    assert run(**asked).name == "Completed"
    with pytest.raises(ValueError, match="above 1"):
        run(**asked, prune=0.5).result()


def test_an_urgent_cell_goes_first(world):
    asked = request(world, "urgent", recipes="gdn 4+2", seeds="36,37,38", tokens=256)
    sweep = Watched("urgent")
    from sweeps import priorities
    from sweeps.request import build
    from sweeps.sweep import pin

    last = next(cell for cell in pin(build(**asked)).cells if cell.seed == 38)
    priorities.put(sweep.store, last.train_key, 5)
    assert run(**asked).is_completed()
    assert list(sweep.states()) == [38, 36, 37]
