"""Plans: every action with its reason, nothing infeasible started, and thousands of cells in a moment."""

from __future__ import annotations

import cProfile
import dataclasses
import json
from pathlib import Path

import pytest
from sweep_helpers import finish, pinned, score

from linear_core.models import resolve
from sweeps import cost, parameters, plan_bench, preflight, queries
from sweeps.cell import Placement
from sweeps.cost import GIB, Machine
from sweeps.grids import ablation, scaling, table1
from sweeps.plan import Plan, make_plan
from sweeps.probe import probe
from sweeps.store import Store
from sweeps.sweep import Sweep

SMALL = Machine(num_cpus=2, memory=24 * GIB, disk_free=100 * GIB)
H200 = Machine.parse("8xh200")


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Base and four cells on a folder that has weights, as far as a plan can see."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return pinned(ablation(str(folder), "gdn,gla", "64+0,56+8", tasks="mmlu,piqa"), reasons={"piqa": "not here"})


def actions(plan: Plan) -> list[str]:
    return [item.action for item in plan.items]


def test_run_skip_resume_wait_and_what_is_still_to_measure(store: Store, sweep: Sweep) -> None:
    assert actions(make_plan(sweep, store, SMALL)) == ["run"] * 5
    finish(store, sweep, sweep.cells[0], {"mmlu": 0.3})
    finish(store, sweep, sweep.cells[1], {"mmlu": 0.2})
    finish(store, sweep, sweep.cells[2], {})
    stopped = store.claim(sweep.cells[3].train_key, "dead")
    assert stopped
    store.note(stopped, tokens=4096)
    store.fail(stopped, "preempted", "SIGTERM")
    assert store.claim(sweep.cells[4].train_key, "someone:1")
    plan = make_plan(sweep, store, SMALL)
    assert actions(plan) == ["skip", "skip", "run", "resume", "wait"]
    assert [item.reason for item in plan.items[1:]] == [
        "done", "trained; scores are missing", "from token 4,096", "claimed by someone:1"]  # fmt: skip
    assert [task.label for task, _ in plan.items[2].tasks] == ["mmlu"], "what cannot be measured here is not to do"
    assert not plan.items[2].train and plan.items[3].resume_tokens == 4096
    assert [item.key for item in plan.to_do] == [sweep.cells[2].train_key, sweep.cells[3].train_key]
    shown = json.loads(plan.to_json())
    assert shown["counts"] == {"run": 1, "resume": 1, "skip": 2, "wait": 1, "refuse": 0} and not plan.refusal
    assert shown["tasks"][1] == {"task": "piqa", "source": "local", "reason": "not here"}
    assert [set(cell) >= {"key", "action", "reason", "label"} for cell in shown["cells"]] == [True] * 5


def test_failures_by_cause(store: Store, sweep: Sweep) -> None:
    for cell, cause, times in zip(sweep.cells[1:], ("nonfinite", "crash", "error", "preempted"), (1, 3, 5, 20)):
        for _ in range(times):
            claim = store.claim(cell.train_key, "x")
            assert claim
            store.fail(claim, cause, f"{cause} it was")
    plan = make_plan(sweep, store, SMALL)
    assert actions(plan) == ["run", "refuse", "refuse", "run", "run"]
    assert plan.items[1].reason.startswith("failed once (nonfinite): nonfinite it was; golinear retry")
    assert "failed 3 times (crash)" in plan.items[2].reason
    queries.retry(store)
    assert actions(make_plan(sweep, store, SMALL)) == ["run"] * 5


def test_the_impossible_is_refused_with_wanted_and_available(store: Store, sweep: Sweep, tmp_path: Path) -> None:
    plan = make_plan(sweep, store, SMALL, Placement(num_gpus=2))
    assert actions(plan) == ["refuse"] * 5 and plan.items[0].reason == "wants 2 GPUs, this machine has 0"
    assert plan.refusal.startswith("all 5 cells")
    tight = make_plan(sweep, store, dataclasses.replace(SMALL, memory=GIB / 100))
    assert "this machine has 0.0" in tight.items[1].reason and tight.items[0].action == "run"
    assert "of disk" in make_plan(sweep, store, dataclasses.replace(SMALL, disk_free=1000.0)).refusal
    (tmp_path / "tiny" / "model.safetensors").unlink()
    assert "no .safetensors" in make_plan(sweep, store, SMALL).items[0].reason


def test_no_weights_at_hand(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    plan = make_plan(pinned(ablation("llama3.1-8b,qwen3-8b-base", "gdn")), store, H200)
    assert actions(plan) == ["skip", "run", "skip", "run"], "a plan for another machine does not look for weights"
    big = dataclasses.replace(H200, is_here=True, disk_free=1e15)
    plan = make_plan(pinned(ablation("llama3.1-8b,qwen3-8b-base", "gdn")), store, big)
    assert "gated; accept its licence" in plan.items[1].reason and "HF_HUB_OFFLINE" in plan.items[3].reason


def test_hours_and_price_of_the_paper(store: Store) -> None:
    """The prototype trained 8.6k tokens/s at 8B on an H200: 20 minutes a cell."""
    plan = make_plan(pinned(table1(tasks=())), store, dataclasses.replace(H200, price=3.0))
    assert plan.counts["run"] == 24 and 24 * 0.25 < plan.gpu_hours < 24 * 0.5
    assert plan.cost == pytest.approx(3 * plan.gpu_hours)
    grown = make_plan(pinned(scaling(seeds=1)), store, H200)
    seconds = {item.cell.base: item.seconds for item in grown.items if not item.cell.is_base}
    qwen = list(seconds.values())[:6]
    assert qwen == sorted(qwen) and not grown.counts["refuse"]
    assert make_plan(pinned(table1()), store, H200, max_gpu_hours=1.0).refusal.endswith("max_gpu_hours is 1")
    cell = next(item.cell for item in grown.items if item.cell.base == "qwen3-8b-base" and not item.cell.is_base)
    queries.measure(store, cost.throughput_name(H200, cell), 1e9)
    again = make_plan(pinned(scaling(seeds=1, tasks=())), store, H200)
    assert next(item.seconds for item in again.items if item.cell == cell) == pytest.approx(0.01, abs=0.01)


def test_memory_estimate_is_near_what_was_measured() -> None:
    """field-notes: LLaMA-3.1-8B, batch 1, T = 4096, gdn 56+8 without checkpointing peaked at 51 GiB."""
    cell = pinned(table1("llama3.1-8b", mechanisms="gdn", budgets="56+8")).cells[1]
    assert cell.train
    estimate = cost.train_memory(resolve("llama3.1-8b").shape, cell.recipe, cell.train, Placement(num_gpus=1))
    assert 45 < estimate / GIB < 60


@pytest.mark.parametrize("text", ["8xtpu", "x", "-1xh200", "h200x8"])
def test_unknown_machines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: here, or"):
        Machine.parse(text)


def test_thousands_of_cells_half_of_them_done(tmp_path: Path) -> None:
    """As `golinear bench plan` measures it; the work per cell is counted, which no busy machine changes."""
    found = plan_bench.measure(1000, tmp_path)
    assert found.pop("seconds") > 0
    assert found == {"cells": 1001, "skip": 500, "run": 501, "queries": 1, "torch": False}
    store = Store(f"sqlite:///{tmp_path / 'golinear.db'}")
    with cProfile.Profile() as profile:
        plan_bench.plan(1000, tmp_path / "model", store)
    assert sum(entry.callcount for entry in profile.getstats()) / 1001 < 900, "calls of a function per cell (747 when written)"


def test_cells_of_a_base_model_that_is_not_as_published_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA-3.1-8B has 74.79 on LAMBADA: with 0.62 something is wrong, whatever a limited or another task says."""
    monkeypatch.setattr("sweeps.plan.why_not_at_hand", lambda model: "")
    tasks = parameters.tasks("lambada_openai,piqa:100,perplexity")
    right, wrong = (pinned(ablation("llama3.1-8b,qwen3-8b-base", "gdn", tasks=tasks[:n]), data=str(n)) for n in (1, 3))
    for spec, base, value in ((right, 0, 0.7431), (wrong, 0, 0.62), (wrong, 2, 0.7095)):
        finish(store, spec, spec.cells[base], {"lambada_openai": value, "piqa": 0.1, "perplexity": 7.0})
        spec = dataclasses.replace(spec, cells=spec.cells[base : base + 2])
        plan = make_plan(spec, store, H200)
        assert actions(plan) == (["skip", "refuse"] if value == 0.62 else ["skip", "run"])
        if value == 0.62:
            assert "llama3.1-8b has 62.00 on lambada_openai, published is 74.79" in plan.items[1].reason
            assert "refused: llama3.1-8b has 62.00" in plan.refusal and "accept_base_scores" in plan.refusal
            assert actions(make_plan(spec, store, H200, accept_base_scores=True)) == ["skip", "run"]
        queries.forget(store, spec.cells[0].train_key)
    off = score(tasks[0], 0.62)
    assert preflight.flagged(wrong.cells[0], off).flags == ("not as published",) and preflight.flagged(wrong.cells[1], off) == off


def test_several_hosts_need_servers(store: Store, sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    two = dataclasses.replace(SMALL, num_nodes=2)
    assert "GOLINEAR_DATABASE_URL" in make_plan(sweep, store, two).refusal
    store.url = "postgresql://host/golinear"  # what the plan looks at
    assert "MLFLOW_TRACKING_URI" in make_plan(sweep, store, two).refusal
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert not make_plan(sweep, store, two).refusal
    four = make_plan(sweep, store, dataclasses.replace(H200, is_here=True, disk_free=1e12), Placement(num_gpus=0.25))
    assert not four.refusal and four.gpu_hours == pytest.approx(four.seconds / 3600 / 4)


@pytest.mark.slow
def test_a_measured_training_step_replaces_the_estimate(store: Store, sweep: Sweep) -> None:
    cell = sweep.cells[1]
    assert cell.train
    short = dataclasses.replace(cell, train=dataclasses.replace(cell.train, sequence_length=128, tokens=128, batch_size=4))
    small = dataclasses.replace(sweep, cells=(sweep.cells[0], short))
    estimate = make_plan(small, store, SMALL).items[1].memory
    said: list[str] = []
    assert probe(small, store, SMALL, said.append) == 1 and "128 tokens" in said[0] and len(said) == 1, said
    measured = queries.measurements(store)[cost.step_bytes_name(SMALL, short)]
    assert 0 < measured < 200e6
    shape, placement = resolve(cell.base).shape, Placement()
    assert short.train
    model = cost.train_memory(shape, short.recipe, short.train, placement, 0.0)
    assert make_plan(small, store, SMALL).items[1].memory == model + 4 * measured != estimate
    assert probe(small, store, SMALL) == 0, "once per base model and length"
    with pytest.raises(ValueError, match="on this machine"):
        probe(small, store, H200)
