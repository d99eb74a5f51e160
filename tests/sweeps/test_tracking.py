"""MLflow on a real SQLite store: names one to one, every run ended as it went, nothing lost to its limits."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_helpers import pinned, score

from linear_core.evaluate.scores import TaskSpec
from sweeps import tracking
from sweeps.grids import ablation
from sweeps.provenance import provenance
from sweeps.system_metrics import sample
from sweeps.tracking import Tracker, metric_name, plain_name

SWEEP = pinned(ablation("smollm2-135m", "gdn", "56+8", "none", "1,2"))
CELL = SWEEP.cells[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    """One migrated store for this file: the first migration takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOLINEAR_HOME", str(tmp_path_factory.mktemp("mlflow")))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return tracking.prepare("ablation")


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30))
def test_names_map_one_to_one(name: str) -> None:
    assert plain_name(metric_name(name)) == name
    assert all(c.isascii() and (c.isalnum() or c in "_./- :") for c in metric_name(name))


def test_readable_names() -> None:
    assert metric_name("niah_single_1@512") == "niah_single_1 at 512" and metric_name("acc,none") == "acc:2c:none"


def test_a_sweep_and_its_cells(shared: Tracker, tmp_path: Path) -> None:
    tracker = pickle.loads(pickle.dumps(shared))
    parent = tracker.start_sweep("ablation", "run-1", tags={"prefect": "http://x"}, note="# table")
    assert tracker.start_sweep("ablation", "run-1") == parent, "a sweep that goes on keeps its run"
    run_id = tracker.start_cell(parent, CELL, sweep_id="run-1", tags={"url": "http://prefect/run"},
                                tasks=[(TaskSpec(name="mmlu"), "mmlu_test sha256:1")])  # fmt: skip
    tracker.log_system(run_id, sample(), step=1)
    rows = [{"step": i, "tokens_seen": 256 * i, "loss": 3.0 / i, "lr": 1e-3, "grad_norm": math.nan} for i in range(1, 4)]
    tracker.log_curve(run_id, rows)
    task = TaskSpec(name="niah_single_1", length=512)
    tracker.log_scores(run_id, [score(task, 0.5, "acc,none"), score(TaskSpec(name="mmlu"), None)])
    (tmp_path / "recipe.json").write_text("{}")
    tracker.log_files(run_id, tmp_path, ["recipe.json", "not-there.json"])
    tracker.log_trained(run_id, CELL, {**provenance(), "new_parameters": 726030})
    tracker.end(run_id)
    tracker.end(parent, "FAILED", "1 cell failed")

    run = tracker.client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == CELL.label
    assert run.data.params["mechanism"] == "gdn" and run.data.params["budget"] == "56+8"
    assert run.data.params["learning_rate"] == "0.002" and run.data.params["seed"] == "1"
    assert run.data.tags["kind"] == "cell" and run.data.tags["mlflow.parentRunId"] == parent
    system = {name for name in run.data.metrics if name.startswith("system/")}
    assert system >= {"system/cpu_utilization_percentage", "system/process_memory_megabytes"}
    assert {k: v for k, v in run.data.metrics.items() if k not in system} == {
        "train/loss": 1.0, "train/lr": 1e-3, "eval/niah_single_1 at 512/acc:2c:none": 0.5}  # fmt: skip
    assert {"commit", "environment", "hardware"} <= set(run.data.tags)
    assert [m.step for m in tracker.client.get_metric_history(run_id, "train/loss")] == [256, 512, 768]
    assert run.data.params["new_parameters"] == "726030" and run.data.tags["version.torch"]
    inputs = {entry.dataset.name: entry.tags[0].value for entry in run.inputs.dataset_inputs}
    assert inputs == {"training text": "training", "mmlu": "evaluation"}
    base = tracker.client.get_logged_model(run.inputs.model_inputs[0].model_id)
    assert (base.name, base.model_type) == (CELL.base_of().train_key, "base")
    assert run.inputs.dataset_inputs[0].dataset.digest == CELL.data
    model = tracker.client.get_logged_model(run.outputs.model_outputs[0].model_id)
    assert (model.name, model.status, model.params["budget"]) == (CELL.train_key, "READY", "56+8")
    artifacts = {item.path for item in tracker.client.list_artifacts(run_id)}
    assert artifacts == {"cell.json", "recipe.json", "scores"}
    assert len(tracker.client.list_artifacts(run_id, "scores")) == 2, "missing scores are kept with their reason"
    ended = tracker.client.get_run(parent)
    assert ended.info.status == "FAILED" and ended.data.tags["reason"] == "1 cell failed"
    assert [r.info.run_id for r in tracker.search("tags.kind = 'cell' and tags.sweep_id = 'run-1'")] == [run_id]


def test_long_values_are_kept_whole_beside_the_run(shared: Tracker) -> None:
    run_id = shared.client.create_run(shared.experiment_id).info.run_id
    shared.log_params(run_id, {"layers": "x" * 7000, **{f"p{i}": i for i in range(150)}})
    shared.set_tags(run_id, {"why": "y" * 9000})
    shared.end(run_id)
    run = shared.client.get_run(run_id)
    assert run.data.params["layers"] == "see params/layers.txt" and len(run.data.params) == 151
    assert run.data.tags["why"].endswith("…") and len(run.data.tags["why"]) == 8000
    assert Path(shared.client.download_artifacts(run_id, "tags/why.txt")).read_text() == "y" * 9000


def test_orphans_end_killed_and_nothing_stays_running(shared: Tracker) -> None:
    parent = shared.start_sweep("ablation", "run-2")
    dead, alive = (shared.start_cell(parent, cell) for cell in SWEEP.cells[1:3])
    assert shared.end_orphans([alive]) == [dead]
    assert shared.client.get_run(dead).info.status == "KILLED"
    assert "died" in shared.client.get_run(dead).data.tags["reason"]
    shared.end(alive, "FAILED", "loss is nan")
    shared.end(parent)
    assert not list(shared.search("attributes.status = 'RUNNING'"))


def test_more_runs_than_a_page_stay_visible(shared: Tracker) -> None:
    for _ in range(7):
        shared.end(shared.client.create_run(shared.experiment_id, tags={"many": "1"}).info.run_id)
    assert len(list(shared.search("tags.many = '1'", page=3))) == 7


def test_a_deleted_experiment_comes_back(shared: Tracker, tmp_path: Path) -> None:
    gone = tracking.prepare("gone", uri=shared.uri)
    gone.client.delete_experiment(gone.experiment_id)
    assert tracking.prepare("gone", uri=shared.uri).experiment_id == gone.experiment_id
    with pytest.raises(ValueError, match="cannot be used"):
        tracking.prepare("x", uri="http://127.0.0.1:9")


def _worker(tracker: Tracker, number: int) -> None:
    parent = tracker.start_sweep("ablation", "run-3")
    tracker.end(tracker.start_cell(parent, SWEEP.cells[1], tags={"number": str(number)}))


def test_processes_share_the_prepared_store(shared: Tracker) -> None:
    """Migration and experiment come once, before fan-out; then every process writes."""
    shared.start_sweep("ablation", "run-3")
    other = multiprocessing.get_context("spawn").Process(target=_worker, args=(shared, 1))
    other.start()
    while other.is_alive():
        _worker(shared, 0)
    assert other.exitcode == 0
    assert len(list(shared.search("tags.kind = 'sweep' and tags.sweep_id = 'run-3'"))) == 1
    assert len(list(shared.search("tags.number = '1'"))) == 1
    with sqlite3.connect(shared.uri.removeprefix("sqlite:///")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
