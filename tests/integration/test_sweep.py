"""Small sweeps of a tiny model through real Prefect, Ray and SQLite MLflow."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prefect.settings import PREFECT_API_URL

from sweeps import queries, schema, study, tables
from sweeps.home import home
from sweeps.request import build
from sweeps.store import Store
from sweeps.sweep import pin
from sweeps.tracking import prepare

pytestmark = [pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]
TASKS = "perplexity:512,agreement:256"


def request(world, name: str, **changes: Any) -> dict[str, Any]:
    small = {"tokens": 512, "sequence_length": 64, "batch_size": 2, "warmup_steps": 1, "tasks": TASKS, "name": name}
    return {"models": world.model, "recipes": "gla 4+0,gdn 4+2", **small, **changes}


def run(**parameters: Any) -> Any:
    from flows.sweep import sweep

    return sweep(**parameters, return_state=True)


def cells(name: str) -> dict[str, Any]:
    """Plan items of a sweep by what they are: ``base``, ``gla 4+0``, …"""
    from sweeps.plan import make_plan

    store = Store()
    plan = make_plan(queries.load_sweep(store, name)[1], store)
    return {"base" if item.cell.is_base else item.cell.recipe.name: item for item in plan.items}


def runs(name: str) -> dict[str, list[Any]]:
    """MLflow's cell runs of a sweep by their name's recipe, newest first."""
    tracker = prepare("ablation")
    sweep_id, _ = queries.load_sweep(Store(), name)
    found: dict[str, list[Any]] = {}
    for entry in tracker.search(f"tags.kind = 'cell' and tags.sweep_id = '{sweep_id}'"):
        found.setdefault(entry.data.params.get("mechanism", ""), []).append(entry)
    return found


def test_two_cells_end_to_end_and_again(world, monkeypatch):
    asked = request(world, "two", tasks=f"{TASKS},diagnostics@64:256,latency@32")
    state = run(**asked)
    assert state.is_completed(), state.message
    store = Store()
    frame = tables.frame(store, queries.load_sweep(store, "two")[1])
    measured = frame[frame.status == "measured"]
    assert set(measured.task) == {"perplexity", "agreement", "diagnostics@64", "latency@32"}
    assert set(measured[measured.task == "latency@32"].key) == set(measured.key), "the base model's speed as well"
    assert measured.key.nunique() == 3

    tracked = runs("two")
    assert {name: [entry.info.status for entry in found] for name, found in tracked.items()} == {
        "softmax": ["FINISHED"], "gla": ["FINISHED"], "gdn": ["FINISHED"],
    }  # fmt: skip
    gdn = tracked["gdn"][0]
    assert gdn.data.params["budget"] == "4+2"
    assert {"eval/perplexity", "gap/perplexity", "train/loss", "system/cpu_utilization_percentage"} <= set(gdn.data.metrics)
    curve = prepare("ablation").client.get_metric_history(gdn.info.run_id, "train/loss")
    assert [point.step for point in curve] == [128, 256, 384, 512]
    artifacts = {file.path for file in prepare("ablation").client.list_artifacts(gdn.info.run_id)}
    assert {"cell.json", "new_parameters.safetensors", "scores"} <= artifacts
    parent = prepare("ablation").client.get_run(gdn.data.tags["mlflow.parentRunId"])
    assert parent.info.status == "FINISHED" and "gdn 4+2" in parent.data.tags["mlflow.note.content"]
    reported = {file.path for file in prepare("ablation").client.list_artifacts(parent.info.run_id, "report")}
    assert reported == {"report/index.html", "report/study.json"}
    found = study.from_store(store, "two")
    assert [len(errors["nmse"]) for errors in found.maps.values()] == [2, 2], "layers"
    page = home() / "reports" / queries.load_sweep(store, "two")[0] / "index.html"
    assert "gdn 4+2</strong>" in page.read_text() or "gla 4+0</strong>" in page.read_text()
    filters = {"artifacts": {"key": {"any_": ["report"]}}}
    made = httpx.post(f"{PREFECT_API_URL.value()}/artifacts/filter", json=filters, timeout=20).json()
    assert any("MLflow" in found["data"] or str(page) in found["data"] for found in made)

    with monkeypatch.context() as patch:
        patch.setattr("sweeps.report.write", lambda *_: 1 / 0)  # a report that cannot be written costs no result
        again = run(**asked)
    assert again.is_completed() and "3 were done before" in again.message
    assert len(runs("two")["gdn"]) == 1

    key = cells("two")["gdn 4+2"].key
    queries.forget(store, key)
    assert {name: item.action for name, item in cells("two").items()} == {
        "base": "skip",
        "gla 4+0": "skip",
        "gdn 4+2": "run",
    }
    assert run(**asked).is_completed()
    assert len(runs("two")["gdn"]) == 2 and len(runs("two")["gla"]) == 1


@pytest.mark.faults
def test_a_failing_cell_is_named_and_the_others_keep_their_scores(world):
    asked = request(world, "failing", seeds=7)
    store = Store()
    broken = next(cell for cell in pin(build(**asked)).cells if cell.recipe.mechanism == "gla")
    for attempt in range(1, 40):  # its results cannot be written: a folder lies where the file should be
        (store.blobs.root / broken.train_key / str(attempt) / "new_parameters.safetensors").mkdir(parents=True)
    state = run(**asked, fail_fast=True)
    assert state.is_failed() and cells("failing")["gdn 4+2"].action == "run", "after a failure none is started"
    state = run(**asked)
    assert state.is_failed()
    assert "1 of 3 cells" in state.message and "gla 4+0" in state.message
    items = cells("failing")
    assert items["gdn 4+2"].action == "skip" and items["base"].action == "skip" and items["gla 4+0"].action == "resume"
    failure = queries.failures(store, broken.train_key)[0]
    assert failure.cause == "error" and "in save_new_parameters" in failure.traceback and failure.log_tail
    failed = runs("failing")["gla"][0]
    assert failed.info.status == "FAILED" and failed.data.tags["reason"]
    assert queries.sweep_state(store, queries.load_sweep(store, "failing")[0]) == "failed"

    shutil.rmtree(store.blobs.root / broken.train_key)
    assert run(**asked).is_completed()
    assert len(runs("failing")["gdn"]) == 1


@pytest.mark.faults
def test_a_killed_flow_goes_on_from_its_checkpoint(world):
    asked = request(world, "killed", recipes="gdn 4+2", tokens=65536, seeds=3, checkpoint_minutes=0.01)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in asked.items()]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "ablation", *options]
    server = {**os.environ, "PREFECT_API_URL": PREFECT_API_URL.value()}
    process = subprocess.Popen(command, env=server, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    store = Store()
    wait_for(lambda: any(row.tokens for row in attempts(store, "gdn")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with store.engine.begin() as connection:  # a minute later
        connection.execute(sa.update(schema.claims).values(expires_at=0.0))
    assert cells("killed")["gdn 4+2"].action == "resume"

    assert run(**asked).is_completed()
    first, second = runs("killed")["gdn"][::-1]
    assert first.info.status == "KILLED" and second.info.status == "FINISHED"
    states = [row.state for row in attempts(store, "gdn")]
    assert states == ["lost", "done"]
    steps = [point.step for point in prepare("ablation").client.get_metric_history(second.info.run_id, "train/loss")]
    assert sorted(steps) == list(range(128, 65537, 128)), "the whole curve, each point once"


def attempts(store: Store, mechanism: str) -> list[Any]:
    """Attempts at cells of this mechanism in the newest sweep, oldest first."""
    try:
        _, sweep = queries.load_sweep(store, "killed")
    except ValueError:
        return []
    keys = [cell.train_key for cell in sweep.cells if cell.recipe.mechanism == mechanism]
    return store.read(sa.select(schema.attempts).where(schema.attempts.c.key.in_(keys)).order_by(schema.attempts.c.id))


def wait_for(condition: Any, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the process ended before it was killed"
        assert time.monotonic() < end, f"not within {seconds} s (load {os.getloadavg()[0]:.1f})"
        time.sleep(0.1)
