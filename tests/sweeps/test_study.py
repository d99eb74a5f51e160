"""A study leaves the store as a file and comes back the same, without the store."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_helpers import finish, pinned, score

from linear_core.evaluate.scores import TaskSpec
from sweeps import items, render, study, tables
from sweeps.compare import difference
from sweeps.grids import ablation
from sweeps.store import Store, new_holder
from sweeps.sweep import Sweep

SWEEP = pinned(
    ablation("smollm2-135m", "gdn,gla", "56+8", "none", "1,2", tasks="lambada_openai,perplexity"),
    reasons={"perplexity": "no text here"},
)
PROVENANCE = {
    "commit": "abc", "dirty": False, "hardware": "NVIDIA H200", "environment": "e1", "versions": {"torch": "2.11.0"},
    "placement": {"num_gpus": 1}, "training": {"loss": 2.5, "tokens_per_second": 1e5}, "at": "2026-11-30T00:00:00+00:00",
}  # fmt: skip


def answers(right: int, total: int = 400, seed: int = 0) -> list[float]:
    values = [1.0] * right + [0.0] * (total - right)
    random.Random(seed).shuffle(values)
    return values


def filled(store: Store, sweep: Sweep = SWEEP) -> None:
    for cell, right in zip(sweep.cells, (300, 280, 282, 200, None)):
        if right is None:
            claim = store.claim(cell.train_key, new_holder())
            assert claim
            store.fail(claim, "nonfinite", "loss is nan at step 3")
            continue
        finish(store, sweep, cell, {}, **PROVENANCE)
        claim = store.claim(cell.train_key, new_holder())
        assert claim
        task, key = sweep.score_keys(cell)[0]
        values = answers(right)
        made = score(task, right / 400)
        made = type(made)(**{**vars(made), "details": {"items": list(range(400)), "values": values}})
        store.put_scores(claim, key, [made])
        if not cell.is_base:
            rows = [{"step": i, "tokens_seen": 256 * (i + 1), "loss": 5 - i / 200, "learning_rate": 1e-3} for i in range(600)]
            path = store.published_folder(cell.train_key) / "curve.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        store.finish(claim)


def test_the_file_holds_everything_and_the_store_is_not_needed(store: Store, tmp_path: Path) -> None:
    filled(store)
    made = study.of_sweep(store, SWEEP, "ablation-1")
    text = study.to_json(made)
    assert text == study.to_json(study.of_sweep(store, SWEEP, "ablation-1")), "the same store, the same file"
    again = study.from_json(text)
    assert study.to_json(again) == text
    for name in render.FORMATS:
        assert render.render(again.data, name) == render.render(made.data, name), name
    assert [f["reason"] for f in again.failures] == ["loss is nan at step 3"]
    assert len(again.curves) == 3 and all(len(curve["loss"]) <= 128 for curve in again.curves.values())
    assert again.versions == {"e1": {"torch": "2.11.0"}} and str(tmp_path) not in text
    assert json.loads(text)["rows"][1]["scores"]["lambada_openai"]["value"] == pytest.approx(70.25)
    path = tmp_path / "results.json"
    path.write_text(text)
    assert study.to_json(study.read([path])) == text
    assert len(study.read([path, path]).data) == len(made.data), "a score in two files counts once"
    for wrong, said in (("{", "not JSON"), ("[]", "not a study"), ('{"format": "x"}', "allowed: 'golinear study 1'")):
        with pytest.raises(ValueError, match=said):
            study.from_json(wrong)
    with pytest.raises(ValueError, match="not a file"):
        study.read([tmp_path / "none.json"])


def test_differences_are_judged_by_items_and_seeds_and_bold_follows(store: Store) -> None:
    filled(store)
    table = tables.summary(tables.frame(store, SWEEP))
    column = table.columns[0]
    base, gdn, gla = table.rows
    found = difference(base.samples[column], gdn.samples[column], column)
    assert found and found.real and found.value == pytest.approx(-4.75) and found.method == "paired items, 1 and 2 seeds"
    assert found.low is not None and found.high is not None and found.low < -4.75 < found.high < 0
    assert gdn.entries[column].best and not gla.entries[column].best and gla.entries[column].partial
    same = difference(gla.samples[column], gla.samples[column], column)
    assert same and same.value == 0 and not same.real
    assert difference(base.samples[table.columns[1]], gdn.samples[table.columns[1]], table.columns[1]) is None


@given(st.lists(st.sampled_from([0.0, 1.0]), max_size=40) | st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_items_come_back_as_they_were(values: list[float]) -> None:
    assert items.unpack(items.pack(values)).tolist() == values


def test_only_the_main_metric_of_a_task_keeps_its_items() -> None:
    details = {"items": [1, 2], "values": np.array([0.5, 2.0]).tolist()}
    task = TaskSpec(name="agreement")
    for metric, there in (("top1", True), ("kl", False)):
        made = score(task, 0.5, metric)
        assert bool(items.kept(type(made)(**{**vars(made), "details": details}))) is there
    assert items.kept(score(task, 0.5, "top1")) == {}
    with pytest.raises(ValueError, match="not packed items"):
        items.unpack("bits:9:AA==")
