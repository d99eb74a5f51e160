"""MLflow on a real SQLite store: names one to one, every run ended as it went, nothing lost to its limits."""

from __future__ import annotations

import json
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
from sweeps import mlflow_view, tracking
from sweeps.grids import ablation
from sweeps.mlflow_view import metric_name, plain_name
from sweeps.provenance import provenance
from sweeps.system_metrics import sample
from sweeps.tracking import Tracker

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
    found = [score(task, 0.5), score(task, 0.25, "acc,none"), score(TaskSpec(name="mmlu"), None)]
    tracker.log_scores(run_id, CELL, found, base=[score(task, 0.75)])
    (tmp_path / "recipe.json").write_text("{}")
    tracker.log_files(run_id, tmp_path, ["recipe.json", "not-there.json"])
    tracker.log_trained(run_id, CELL, {**provenance(), "new_parameters": 726030})
    tracker.end(run_id)
    tracker.end(parent, "FAILED", "1 cell failed")

    run = tracker.client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == CELL.label
    assert run.data.params["mechanism"] == "gdn" and run.data.params["budget"] == "56+8"
    assert run.data.params["train.learning_rate"] == "0.002" and run.data.params["seed"] == "1"
    assert run.data.tags["kind"] == "cell" and run.data.tags["mlflow.parentRunId"] == parent
    system = {name for name in run.data.metrics if name.startswith("system/")}
    assert system >= {"system/cpu_utilization_percentage", "system/process_memory_megabytes"}
    assert {k: v for k, v in run.data.metrics.items() if k not in system} == {
        "train/loss": 1.0, "train/lr": 1e-3, "eval/niah_single_1 at 512": 0.5, "gap/niah_single_1 at 512": -0.25,
        "eval/niah_single_1 at 512 acc:2c:none": 0.25, "cost/new_parameters": 726030.0,
        "cost/cache_mib_at_32k": pytest.approx(5.8, abs=0.1)}  # fmt: skip
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


def test_a_sweep_is_shown_without_set_up(shared: Tracker) -> None:
    """Its run says what was asked for, its note links to the cells, and the menu of views has it."""
    spec = pinned(ablation("smollm2-135m", "gla,gdn", "56+8,64+0", tasks="lambada_openai,niah_single_1@512"))
    parent = shared.start_sweep("shown", "shown-1")
    shared.show_sweep(parent, "shown", "shown-1", spec)
    before = shared.start_sweep("before", "before-1")
    own, other = shared.start_cell(parent, spec.cells[1], sweep_id="shown-1"), shared.start_cell(before, spec.cells[2])
    shared.note_sweep(parent, "shown-1", "the table", [own, other])
    run = shared.client.get_run(parent)
    assert run.data.params["recipes"] == "gla 56+8, gla 64+0, gdn 56+8, gdn 64+0" and run.data.params["cells"] == "5"
    assert run.data.tags["mlflow.note.content"].endswith("the table") and other in run.data.tags["mlflow.note.content"]
    assert "(#/compare-runs?runs=%5B%22" in run.data.tags["mlflow.note.content"], "MLflow's page wants runs first"
    tags = shared.client.get_experiment(shared.experiment_id).tags
    state = json.loads(json.loads(tags["mlflow.sharedViewState.shown-1"])["state"])
    assert state["compareRunCharts"][0]["selectedParams"] == ["mechanism", "budget"]
    assert "metrics.`gap/niah_single_1 at 512`" in state["selectedColumns"]
    assert {found.info.run_id for found in shared.search(state["searchFilter"])} == {own, other}
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`eval/lambada_openai`", False)
    for run_id in (own, other, parent, before):
        shared.end(run_id)


def test_views_stay_few_and_small() -> None:
    wide = pinned(ablation("smollm2-135m", tasks=",".join(f"niah_single_1@{512 + i}" for i in range(200))))
    texts = {f"mlflow.sharedViewState.s{i}": mlflow_view.saved_view("wide", f"s{i}", wide, i) for i in range(25)}
    assert max(map(len, texts.values())) <= 5000
    by_hand = json.dumps({"name": "mine", "createdAt": 0, "state": "{}"})
    assert mlflow_view.outdated({**texts, "mlflow.sharedViewState.mine": by_hand, "kind": "x"}) == [
        f"mlflow.sharedViewState.s{i}" for i in reversed(range(5))
    ]


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
    dead, alive = (shared.start_cell(parent, cell, tags={"store": "mine"}) for cell in SWEEP.cells[1:3])
    assert tracking.prepare("another", uri=shared.uri).end_orphans([], "theirs") == []
    assert tracking.prepare("another", uri=shared.uri).end_orphans([alive], "mine") == [dead], "in whatever experiment"
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
