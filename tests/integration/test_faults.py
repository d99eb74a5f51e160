"""Faults injected into real small sweeps; afterwards store, Prefect and MLflow must tell the truth, and nothing is lost.

The table in docs/sweeps-that-lose-nothing.md says what each does. `make test-faults` runs them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import sqlalchemy as sa
from prefect.settings import PREFECT_API_URL

from sweeps import queries, schema, services
from sweeps.home import database_url, home
from sweeps.store import Store
from sweeps.tracking import prepare
from tests.core.hub_stand_in import hub
from tests.integration.test_sweep import cells, request, runs

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("services_up"), pytest.mark.timeout(400)]
TOKENS = 65_536  # some seconds of training: time enough to be hit
DONE = {"base": "skip", "gdn 4+2": "skip"}


@pytest.fixture(autouse=True, scope="module")
def claims_that_expire_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOLINEAR_CLAIM_SECONDS", "12")
        yield


def asked_for(world, name: str, seed: int, **changes: Any) -> dict[str, Any]:
    values = {"recipes": "gdn 4+2", "tokens": TOKENS, "seeds": seed, "checkpoint_minutes": 0.02}
    return request(world, name, **{**values, **changes})


def start(parameters: dict[str, Any], **environment: str) -> subprocess.Popen[bytes]:
    """`golinear run` in a process of its own, with its own Ray unless ``environment`` names one."""
    options = [f"--{key.replace('_', '-')}={value}" for key, value in parameters.items()]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "ablation", *options]
    whole = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value(), **environment}
    with (home() / "flow.log").open("ab") as out:  # for who looks at a failure
        return subprocess.Popen(command, env=whole, stdout=out, stderr=subprocess.STDOUT)


def base_attempts(name: str) -> list[Any]:
    """As ``attempts``, at the sweep's base model."""
    return attempts(name, base=True)


def attempts(name: str, *, base: bool = False) -> list[Any]:
    """Attempts at the sweep's gdn cell, oldest first; none while the sweep is not in the store."""
    store = Store()
    try:
        _, sweep = queries.load_sweep(store, name)
    except ValueError:
        return []
    keys = [cell.train_key for cell in sweep.cells if cell.is_base == base]
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


def prefect_states(name: str) -> list[str]:
    """States of the flow runs that were asked for this sweep, newest first."""
    body = {"sort": "EXPECTED_START_TIME_DESC", "limit": 20}
    rows = httpx.post(f"{PREFECT_API_URL.value()}/flow_runs/filter", json=body, timeout=30).json()
    return [row["state_type"] for row in rows if row["parameters"].get("name") == name]


def prefect_state(name: str) -> str:
    """State of the newest flow run that was asked for this sweep, once Prefect knows how it ended."""
    until(lambda: prefect_states(name)[0] not in ("RUNNING", "PENDING", "SCHEDULED"), 60)
    return prefect_states(name)[0]


def test_actor_killed_its_cell_goes_on_in_the_same_flow(world):
    process = start(asked_for(world, "actor", 11))
    until(lambda: in_training("actor"))
    child(process, "ray::Worker").kill()
    assert end_of(process) == 0
    assert [(row.state, row.cause) for row in attempts("actor")] == [("failed", "crash"), ("done", "")]
    assert actions("actor") == DONE and tracked("actor") == ["FAILED", "FINISHED"]
    assert prefect_state("actor") == "COMPLETED"


def test_flow_told_to_stop_saves_and_says_so(world):
    process = start(asked_for(world, "told", 12))
    until(lambda: in_training("told"))
    told = time.monotonic()
    process.terminate()
    assert end_of(process) != 0
    assert time.monotonic() - told < 30
    (attempt,) = attempts("told")
    assert (attempt.state, attempt.cause, attempt.counted) == ("failed", "preempted", False)
    assert actions("told") == {"base": "skip", "gdn 4+2": "resume"} and tracked("told") == ["KILLED"]
    assert prefect_state("told") in ("CRASHED", "FAILED")
    assert end_of(start(asked_for(world, "told", 12))) == 0
    assert actions("told") == DONE and tracked("told") == ["KILLED", "FINISHED"]


def test_flow_killed_another_takes_over_when_its_claim_expires(world):
    process = start(asked_for(world, "killed flow", 13))
    until(lambda: in_training("killed flow"))
    orphans = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert actions("killed flow")["gdn 4+2"] == "wait"  # by its claim it may still live
    assert end_of(start(asked_for(world, "killed flow", 13))) == 0
    assert [row.state for row in attempts("killed flow")] == ["lost", "done"]
    assert prefect_states("killed flow") == ["COMPLETED", "CRASHED"]
    assert actions("killed flow") == DONE and tracked("killed flow") == ["KILLED", "FINISHED"]
    assert not [p for p in orphans if p.is_running() and p.name().startswith("ray::Worker")]


def test_ray_killed_under_the_flow(world):
    process = start(asked_for(world, "ray", 14))
    until(lambda: in_training("ray"))
    child(process, "raylet").kill()
    end_of(process)
    assert actions("ray")["gdn 4+2"] in ("resume", "wait", "skip")
    assert end_of(start(asked_for(world, "ray", 14))) == 0
    assert actions("ray") == DONE and tracked("ray")[-1] == "FINISHED" and "RUNNING" not in tracked("ray")


def test_prefect_and_mlflow_servers_restarted_under_the_flow(world, services_up):
    process = start(asked_for(world, "servers", 15))
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

    run_deployment("sweep/ablation", parameters=asked_for(world, "worker", 16), timeout=0)
    until(lambda: in_training("worker"))
    os.kill(services.records()["worker"].pid, signal.SIGKILL)
    until(lambda: bool(attempts("worker")) and attempts("worker")[-1].state == "done")
    assert prefect_state("worker") == "COMPLETED"
    assert actions("worker") == DONE and tracked("worker") == ["FINISHED"]
    services.up(obtain_model=False)
    assert services.records()["worker"].alive


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB for the attempts' folders."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small file system here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_disk_full_in_training_the_next_run_goes_on_once_there_is_room(world, small_disk):
    asked = asked_for(world, "disk", 17, tokens=2 * TOKENS)
    process = start(asked, GOLINEAR_BLOBS=str(small_disk))
    until(lambda: in_training("disk"))
    free = shutil.disk_usage(small_disk).free
    (small_disk / "somebody else's").write_bytes(b"x" * (free - 8192))
    assert end_of(process) != 0
    (attempt,) = attempts("disk")
    assert (attempt.state, attempt.cause) == ("failed", "disk") and "space" in attempt.reason
    assert actions("disk") == {"base": "skip", "gdn 4+2": "resume"} and tracked("disk") == ["FAILED"]
    assert prefect_state("disk") == "FAILED"
    (small_disk / "somebody else's").unlink()
    assert end_of(start(asked, GOLINEAR_BLOBS=str(small_disk))) == 0
    assert actions("disk") == DONE and tracked("disk") == ["FAILED", "FINISHED"]


def test_hub_busy_while_the_weights_are_fetched(world, tmp_path):
    busy = threading.Event()
    with hub({}, models={"tiny/model": Path(world.model)}, busy=busy) as there:
        names = ("HF_ENDPOINT", "HF_HUB_DISABLE_XET")
        environment = {**{name: there[name] for name in names}, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        process = start(asked_for(world, "hub", 18, models="tiny/model", tokens=256), **environment)
        until(lambda: bool(base_attempts("hub")))
        busy.set()
        until(lambda: base_attempts("hub")[0].state == "failed")
        busy.clear()
        assert end_of(process) == 0
    assert [(row.state, row.cause) for row in base_attempts("hub")] == [("failed", "network"), ("done", "")]
    assert "429" in base_attempts("hub")[0].reason + base_attempts("hub")[0].traceback
    assert [row.state for row in attempts("hub")] == ["done"] and tracked("hub") == ["FINISHED"]
    assert prefect_state("hub") == "COMPLETED"


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster

here = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**here, "num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1, env_vars={"GOLINEAR_HOME": f"{sys.argv[1]}/{name}"}, **here) for name in "ab"]
print("nodes", cluster.address, *(node.all_processes["raylet"][0].process.pid for node in nodes), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, list[int]]]:
    """A Ray cluster on loopback, in a process of its own: a head that takes no work and two nodes of one CPU, each with a
    disk of its own. Gives its address and the nodes' processes."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # or it would leave loopback
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)  # of the nodes and of the flow
    command = [sys.executable, "-c", TWO_NODES, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    said = next(line.split() for line in process.stdout if line.startswith("nodes "))
    family = psutil.Process(process.pid).children(recursive=True)
    yield said[1], [int(pid) for pid in said[2:]]
    process.stdin.close()
    process.wait(60)
    for left in psutil.wait_procs(family, timeout=10)[1]:
        left.kill()


def test_node_lost_its_cell_goes_on_on_another(world, two_nodes, tmp_path):
    address, nodes = two_nodes
    environment = {
        "RAY_ADDRESS": address, "GOLINEAR_DATABASE_URL": database_url(),
        "GOLINEAR_BLOBS": f"local://{tmp_path}/bucket",  # an object store, as far as golinear can see
    }  # fmt: skip
    process = start(asked_for(world, "node", 19, workers=1), **environment)
    until(lambda: in_training("node"))
    (lost,) = {p.ppid() for p in psutil.process_iter(["name"]) if p.info["name"].startswith("ray::Worker")} & set(nodes)
    node = psutil.Process(lost)
    for gone in (node, *node.children(recursive=True)):  # all of it, the raylet first
        gone.kill()
    assert end_of(process) == 0
    assert [(row.state, row.cause) for row in attempts("node")] == [("failed", "preempted"), ("done", "")]
    assert actions("node") == DONE and tracked("node") == ["KILLED", "FINISHED"]
    done = attempts("node")[-1]
    other = next(path for path in tmp_path.glob("[ab]/cells/*/*") if path.name == str(done.id))
    assert "going on from a checkpoint of another node" in (other / "log.txt").read_text()
    names = {path.name for path in (tmp_path / "bucket" / done.key / str(done.id)).iterdir()}
    assert "new_parameters.safetensors" in names and "checkpoints" not in names
    artifacts = {file.path for file in prepare("ablation").client.list_artifacts(runs("node")["gdn"][0].info.run_id)}
    assert "new_parameters.safetensors" in artifacts, "MLflow has the files of another node too"
    assert prefect_state("node") == "COMPLETED"
