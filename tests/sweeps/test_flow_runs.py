"""A flow that dies without a word is found dead, once, and its sweep does not say running any more."""

from __future__ import annotations

import time

import pytest

from sweeps import flow_runs, queries
from sweeps.flow_runs import FlowRun
from sweeps.store import Store
from sweeps.sweep import Sweep


def run(flow: str, sweep: str) -> FlowRun:
    return FlowRun(id=flow, sweep_id=sweep, tracking_run=f"mlflow {sweep}")


def test_the_living_and_the_dead(store: Store) -> None:
    now = time.time()
    clocked = Store(store.url, clock=lambda: now)
    for sweep in ("a", "b"):
        queries.save_sweep(clocked, sweep, Sweep(name=sweep, cells=()))
    flow_runs._say(clocked, run("1", "a"))  # these two die
    flow_runs._say(clocked, run("2", "b"))
    assert flow_runs.live_sweeps(clocked) == {"a", "b"} and flow_runs.bury(clocked) == []
    now += 61
    with flow_runs.alive(clocked, run("3", "b")):
        assert flow_runs.live_sweeps(clocked) == {"b"}
        dead = flow_runs.bury(clocked)
        assert {(flow.id, flow.tracking_run) for flow in dead} == {("1", "mlflow a"), ("2", "")}
        assert [queries.sweep_state(clocked, sweep) for sweep in ("a", "b")] == ["failed", "running"]
        assert flow_runs.bury(clocked) == [], "once"
    assert not flow_runs.live_sweeps(clocked)


def test_a_living_flow_renews_and_comes_back_when_it_was_taken_for_dead(store: Store) -> None:
    quick = Store(store.url, expires_after=0.6)
    with flow_runs.alive(quick, run("1", "a")):
        time.sleep(0.9)
        assert flow_runs.live_sweeps(quick) == {"a"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quick, "_clock", lambda: time.time() + 60)
            assert [flow.id for flow in flow_runs.bury(quick)] == ["1"]
        time.sleep(0.5)
        assert flow_runs.live_sweeps(quick) == {"a"}
