"""A base model that is not what it is taken for stops its cells before they train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from flows.runner import DONE, FAILED, Outcome, Runner
from linear_core.evaluate.scores import Score
from sweeps import queries
from sweeps.cell import Placement
from sweeps.cost import Machine
from sweeps.grids import ablation
from sweeps.plan import PlanItem, make_plan
from sweeps.store import Store, new_holder
from sweeps.sweep import TaskSource

H200 = Machine.parse("8xh200")


class Measured(Runner):
    """A runner whose cells are measured at once: LLaMA wrong, Qwen3 as published."""

    def _cell(self, slot: Any, item: PlanItem, together: Any) -> Outcome:
        claim = self.store.claim(item.key, new_holder())
        assert claim
        if not item.cell.is_base:
            self.store.publish(claim, item.cell, {})
        value = {"llama3.1-8b": 0.25, "qwen3-8b-base": 0.7095}[item.cell.base]
        for task, key in item.tasks:
            self.store.put_scores(claim, key, [Score(task=task, metric="acc", value=value)])
        self.store.finish(claim)
        return Outcome(item.cell.label, DONE)


@pytest.mark.parametrize("accept", [False, True])
def test_cells_of_a_base_model_whose_score_is_not_the_published_one_do_not_start(tmp_path: Path, accept: bool) -> None:
    spec = ablation("llama3.1-8b,qwen3-8b-base", "gdn", tasks="lambada_openai")
    cells = tuple(dataclasses.replace(c, revision="r", data="" if c.is_base else "d") for c in spec.cells)
    spec = dataclasses.replace(spec, cells=cells, task_sources=(TaskSource(source="hub", harness="lm-eval"),))
    store, said = Store(f"sqlite:///{tmp_path}/store.db", blobs=str(tmp_path / "blobs")), []
    queries.save_sweep(store, "study-1", spec)
    tracker: Any = type("Tracker", (), {"end_orphans": lambda *_: []})()
    run = Measured(
        sweep=spec, sweep_id="study-1", store=store, tracker=tracker, parent="", machine=H200,
        placement=Placement(num_gpus=1), num_slots=1, say=said.append, links={}, accept_base_scores=accept,
    )  # fmt: skip
    run.run(make_plan(spec, store, H200, accept_base_scores=accept))
    ended = {cell.label: run.outcomes[cell.train_key] for cell in cells}
    assert [ended[name].state for name in ("llama3.1-8b base", "qwen3-8b-base base", "qwen3-8b-base gdn 56+8 s1")] == [DONE] * 3
    llama = ended["llama3.1-8b gdn 56+8 s1"]
    assert llama.state == (DONE if accept else FAILED)
    if not accept:
        assert llama.reason.startswith("refused: llama3.1-8b has 25.00 on lambada_openai, published is 74.79")
        assert len(said) == 1 and "llama3.1-8b base: llama3.1-8b has 25.00" in said[0]
