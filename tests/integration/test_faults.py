"""Faults injected into real small sweeps; afterwards store, Prefect and MLflow must tell the truth, and nothing is lost.

The table in docs/sweeps-that-lose-nothing.md says what each does. `make test-faults` runs them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from prefect.settings import PREFECT_API_URL

from sweeps import queries, schema, services
from sweeps.store import Store
from tests.integration.test_sweep import cells, request, runs

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("services_up"), pytest.mark.timeout(400)]
TOKENS = 131_072  # some fifteen seconds of training: time enough to be hit
DONE = {"base": "skip", "gdn 4+2": "skip"}


def asked(world, name: str, seed: int, **changes: Any) -> dict[str, Any]:
    values = {"recipes": "gdn 4+2", "tokens": TOKENS, "seeds": seed, "checkpoint_minutes": 0.02}
    return request(world, name, **{**values, **changes})


def start(parameters: dict[str, Any]) -> subprocess.Popen[bytes]:
    """`golinear run` in a process of its own, with its own Ray."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in parameters.items()]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "ablation", *options]
    environment = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)


def attempts(name: str) -> list[Any]:
    """Attempts at the sweep's gdn cell, oldest first; none while the sweep is not in the store."""
    store = Store()
    try:
        _, sweep = queries.load_sweep(store, name)
    except ValueError:
        return []
    keys = [cell.train_key for cell in sweep.cells if not cell.is_base]
    return store.read(sa.select(schema.attempts).where(schema.attempts.c.key.in_(keys)).order_by(schema.attempts.c.id))


def until(condition: Any, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def in_training(name: str) -> bool:
    """Whether the sweep's cell trains and has a checkpoint."""
    return any(row.state == "running" and row.tokens for row in attempts(name))


def child(process: subprocess.Popen[bytes] | None, name: str) -> psutil.Process:
    """A descendant of this (or a flow's) process by the beginning of its name."""
    parent = psutil.Process(process.pid if process else os.getpid())
    return next(p for p in parent.children(recursive=True) if p.name().startswith(name[:15]))


def end_of(process: subprocess.Popen[bytes], seconds: float = 200) -> int:
    return process.wait(timeout=seconds)


def tracked(name: str) -> list[str]:
    """MLflow's states of the gdn cell, oldest first."""
    return [entry.info.status for entry in runs(name)["gdn"]][::-1]


def actions(name: str) -> dict[str, str]:
    return {cell: item.action for cell, item in cells(name).items()}


def prefect_state(name: str) -> str:
    """State of the newest flow run that was asked for this sweep, once Prefect knows how it ended."""
    import httpx

    found: dict[str, Any] = {}

    def ended() -> bool:
        body = {"sort": "EXPECTED_START_TIME_DESC", "limit": 20}
        rows = httpx.post(f"{PREFECT_API_URL.value()}/flow_runs/filter", json=body, timeout=30).json()
        found.update(next(row for row in rows if row["parameters"].get("name") == name))
        return found["state_type"] not in ("RUNNING", "PENDING", "SCHEDULED")

    until(ended, 60)
    return found["state_type"]


def test_actor_killed_its_cell_goes_on_in_the_same_flow(world):
    process = start(asked(world, "actor", 11))
    until(lambda: in_training("actor"))
    child(process, "ray::Worker").kill()
    assert end_of(process) == 0
    assert [(row.state, row.cause) for row in attempts("actor")] == [("failed", "crash"), ("done", "")]
    assert actions("actor") == DONE and tracked("actor") == ["FAILED", "FINISHED"]
    assert prefect_state("actor") == "COMPLETED"


def test_flow_told_to_stop_saves_and_says_so(world):
    process = start(asked(world, "told", 12))
    until(lambda: in_training("told"))
    told = time.monotonic()
    process.terminate()
    assert end_of(process) != 0
    assert time.monotonic() - told < 30
    (attempt,) = attempts("told")
    assert (attempt.state, attempt.cause, attempt.counted) == ("failed", "preempted", False)
    assert actions("told") == {"base": "skip", "gdn 4+2": "resume"} and tracked("told") == ["KILLED"]
    assert prefect_state("told") in ("CRASHED", "FAILED")
    assert end_of(start(asked(world, "told", 12))) == 0
    assert actions("told") == DONE and tracked("told") == ["KILLED", "FINISHED"]


def test_flow_killed_another_takes_over_when_its_claim_expires(world):
    process = start(asked(world, "killed flow", 13))
    until(lambda: in_training("killed flow"))
    orphans = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert actions("killed flow")["gdn 4+2"] == "wait"  # by its claim it may still live
    assert end_of(start(asked(world, "killed flow", 13))) == 0
    assert [row.state for row in attempts("killed flow")] == ["lost", "done"]
    assert actions("killed flow") == DONE and tracked("killed flow") == ["KILLED", "FINISHED"]
    assert not [p for p in orphans if p.is_running() and p.name().startswith("ray::Worker")]


def test_ray_killed_under_the_flow(world):
    process = start(asked(world, "ray", 14))
    until(lambda: in_training("ray"))
    child(process, "raylet").kill()
    end_of(process)
    assert actions("ray")["gdn 4+2"] in ("resume", "wait", "skip")
    assert end_of(start(asked(world, "ray", 14))) == 0
    assert actions("ray") == DONE and tracked("ray")[-1] == "FINISHED" and "RUNNING" not in tracked("ray")


def test_prefect_and_mlflow_servers_restarted_under_the_flow(world, services_up):
    process = start(asked(world, "servers", 15))
    until(lambda: in_training("servers"))
    for name in ("prefect", "mlflow"):
        services._stop(services.records()[name])
    services.up(obtain_model=False)  # at the same addresses
    assert end_of(process) == 0
    assert [row.state for row in attempts("servers")] == ["done"]
    assert actions("servers") == DONE and tracked("servers") == ["FINISHED"]
    assert prefect_state("servers") == "COMPLETED"


def test_prefect_worker_killed_the_flow_lives_on(world):
    from prefect.deployments import run_deployment

    run_deployment("sweep/ablation", parameters=asked(world, "worker", 16), timeout=0)
    until(lambda: in_training("worker"))
    os.kill(services.records()["worker"].pid, signal.SIGKILL)
    until(lambda: bool(attempts("worker")) and attempts("worker")[-1].state == "done")
    assert prefect_state("worker") == "COMPLETED"
    assert actions("worker") == DONE and tracked("worker") == ["FINISHED"]
    services.up(obtain_model=False)
    assert services.records()["worker"].alive
