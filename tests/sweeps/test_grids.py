"""Grids, and every spelling in which their parameters can arrive."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from sweep_helpers import pinned

from linear_core.evaluate.tasks import check_task
from linear_core.settings import TrainSettings
from sweeps import parameters, published
from sweeps.cost import Machine
from sweeps.grids import GRIDS, ablation, join, past_paper, table1
from sweeps.plan import gpu_hours, make_plan
from sweeps.request import build
from sweeps.sweep import Sweep


@pytest.mark.parametrize("value", [
    "gdn,gla", ["gdn", "gla"], ("gdn", "gla"), '["gdn","gla"]', "['gdn', 'gla']", "[gdn, gla]", ["gdn,gla"],
    " gdn , gla ", ["gdn", "gla", "gdn"],
])  # fmt: skip
def test_every_spelling_of_a_list(value: object) -> None:
    assert parameters.items(value, "mechanisms") == ["gdn", "gla"]


@pytest.mark.parametrize("value", ["", [], "x,", ",", "[x", "[[x]]", [["x"]], [None], None, True, {"a": 1}, "[]"])
def test_what_is_no_list_is_refused_with_the_right_spelling(value: object) -> None:
    with pytest.raises(ValueError, match=r"write budgets=56\+8,64\+0 or budgets='\[\"56\+8\",\"64\+0\"\]'"):
        parameters.items(value, "budgets")


def test_numbers() -> None:
    assert parameters.whole_numbers("1,2,3", "seeds") == parameters.whole_numbers([1, 2, 3], "seeds") == [1, 2, 3]
    assert parameters.whole_numbers(range(1, 4), "seeds") == [1, 2, 3] and parameters.whole_numbers(7, "seeds") == [7]
    assert parameters.number("2e-3", "learning_rate") == 2e-3
    assert [parameters.tokens(v) for v in ("10.24M", 4096, 4096.0, "4k")] == [10_240_000, 4096, 4096, 4000]
    for wrong in (math.nan, math.inf, float("12e4567"), "nan", "NaN", "-1", -1, True, None, "x"):
        with pytest.raises(ValueError, match="learning_rate must be a finite number"):
            parameters.number(wrong, "learning_rate")
        with pytest.raises(ValueError, match="seeds"):
            parameters.whole_numbers(wrong, "seeds")
        with pytest.raises(ValueError, match="tokens"):
            parameters.tokens(wrong)
    with pytest.raises(ValueError, match="whole number"):
        parameters.whole_numbers("1.5", "seeds")


def test_tasks_with_limits_and_lengths() -> None:
    found = parameters.tasks("lambada_openai:40,mmlu,niah_single_1@512,vt", limit=8, lengths="1024,4k")
    assert [(t.label, t.limit) for t in found] == [
        ("lambada_openai", 40), ("mmlu", 8), ("niah_single_1@512", 8), ("vt@1024", 8), ("vt@4096", 8)]  # fmt: skip
    assert [t.limit for t in parameters.tasks(["mmlu", "piqa"], limit="mmlu=5,7")] == [5, 7]
    assert [t.limit for t in parameters.tasks(["mmlu", "piqa"], limit={"mmlu": 5})] == [5, None]
    assert [t.limit for t in parameters.tasks("perplexity:32k,agreement@1k:0.1M,mmlu", limit="1.5k")] == [32_000, 100_000, 1500]
    ruler = parameters.tasks("ruler", lengths="1k,4k")
    short, long = ({task.name for task in ruler if task.length == length} for length in (1024, 4096))
    assert len(long) == 13 and short == long - {"qa_hotpot"}, "of a group, what can be made at a length"
    with pytest.raises(ValueError, match="lengths from 256 on"):
        parameters.tasks("s_niah@128")
    assert len(parameters.tasks("paper")) == 7 and parameters.tasks("") == parameters.tasks([]) == ()
    assert parameters.tasks("niah_single_1@4K")[0].length == 4096
    with pytest.raises(ValueError, match="prompt length"):
        parameters.tasks("vt", lengths="1024,x")
    for wrong in ("mmlu:", "mmlu:0", "mmlu@x", "mm lu", "mmlu:1.5", "mmlu:-1"):
        with pytest.raises(ValueError, match="task"):
            parameters.tasks(wrong)


def test_ablation_is_the_product_with_base_models_first_and_reasons_for_what_means_nothing() -> None:
    sweep = ablation("smollm2-135m", "gdn,none,softmax", "56+8,0+0", "none,conv,lora", "1,2", tasks="mmlu")
    assert sweep.cells[0].is_base and sum(cell.is_base for cell in sweep.cells) == 1
    made = {(c.recipe.mechanism, c.recipe.budget, c.recipe.adaptation, c.seed) for c in sweep.cells[1:]}
    assert len(sweep.cells) == len(made) + 1 == 2 * (6 + 2) + 1
    reasons = dict(sweep.left_out)
    assert set(reasons) == {"none 56+8 conv", "none 0+0", "none 0+0 conv", "none 0+0 lora"}
    assert "no linear path" in reasons["none 56+8 conv"] and "needs a window" in reasons["none 0+0"]
    again = ablation("smollm2-135m", ["softmax", "none", "gdn"], "0+0,56+8", "lora,conv,none", [2, 1], tasks="mmlu")
    assert set(again.cells) == set(sweep.cells), "order changes no cell"
    assert Sweep.from_dict(json.loads(json.dumps(sweep.to_dict()))) == sweep


@pytest.mark.parametrize(("axis", "value", "allowed"), [
    ("models", "gpt-2", "qwen3-8b-base"), ("mechanisms", "mamba", "gdn_scalar"), ("budgets", "64", "56"),
    ("budgets", "0+8", "window of at least 1"), ("budgets", "-1+8", "whole numbers"), ("adaptations", "full", "conv"),
    ("merges", "gate", "mass"), ("seeds", "1.5", "whole number"), ("tasks", "mm lu", "name"),
])  # fmt: skip
def test_unknown_words_are_refused_with_what_is_allowed(axis: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=allowed):
        ablation(**{"models": "smollm2-135m", axis: value})


def test_hub_ids_and_names_are_one_model() -> None:
    assert ablation("Qwen/Qwen3-8B-Base", "gdn").cells == ablation("qwen3-8b-base", "gdn").cells


def test_every_grid_has_the_cells_of_its_published_table() -> None:
    """Each published row of our own mechanisms is a cell of the grid, and each grid's tasks can be asked for."""
    tables = {"table1": "5", "table2": "6", "table3": "7", "table4": "4", "table8": "8", "table9": "9", "table10": "10"}
    for name, table in tables.items():
        sweep = GRIDS[name]()
        ours = {(c.base, c.recipe.mechanism, str(c.recipe.window), str(c.recipe.sinks), c.recipe.adaptation)
                for c in sweep.cells if not c.is_base}  # fmt: skip
        wanted = {
            (row["base_model"], row["mechanism"], row["window"], row["sinks"], row["adaptation"])
            for row in published.rows()
            if row["table"] == table and row["mechanism"] in ("gla", "kgla", "gdn", "hedgehog")
        }
        assert wanted <= ours, f"{name} lacks {wanted - ours}"
        assert {cell.seed for cell in sweep.cells if not cell.is_base} == {1, 2, 3}
    for name, grid in GRIDS.items():
        sweep = grid("smollm2-135m")
        assert sweep.name == name and {cell.base for cell in sweep.cells} == {"smollm2-135m"} and grid.__doc__
        for task in sweep.tasks:
            check_task(task)
        assert 0 < gpu_hours(sweep, Machine.parse("h200")) < 5, "small on the smallest model"


def test_every_grid_plans_for_the_real_models_without_their_weights_and_has_a_deployment(store) -> None:
    """Weights are elsewhere, so is the machine: every cell is planned to run, with its time and memory."""
    text = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())
    deployed = {d["parameters"]["grid"]: d["name"] for d in text["deployments"] if "grid" in d["parameters"]}
    assert deployed == {name: name for name in GRIDS}
    for name in GRIDS:
        plan = make_plan(pinned(build(name)), store, Machine.parse("8xh200"))
        assert not plan.refusal and {item.action for item in plan.items} == {"run"}, (name, plan.counts)
        assert all(item.memory > 0 and item.seconds > 0 for item in plan.items)
        assert all((len(item.tasks) > 0) for item in plan.items if item.cell.train is not None)


def test_grids_take_other_models_axes_and_settings() -> None:
    train = TrainSettings(tokens=4096, sequence_length=256)
    sweep = table1("smollm2-135m", seeds=1, mechanisms="gla", train=train, tasks="mmlu:4", source="self")
    assert [cell.label for cell in sweep.cells] == ["smollm2-135m base", "smollm2-135m gla 0+0 s1"]
    assert sweep.cells[1].train == train and sweep.source == "self" and len(sweep.tasks) == 1
    changed = past_paper(seeds=1, train=train, tasks="mmlu")
    assert len({cell.recipe.name + cell.train.objective for cell in changed.cells if cell.train}) == 9
    both = join("both", sweep, table1("qwen3-8b-base", seeds=1, tasks="piqa", source="self"))
    assert [cell.is_base for cell in both.cells[:3]] == [True, True, False] and len(both.tasks) == 2
    with pytest.raises(ValueError, match="training texts"):
        join("both", sweep, table1("qwen3-8b-base"))


def test_layers_that_keep_softmax_attention_are_an_axis_and_a_word_of_a_recipe() -> None:
    sweep = build(recipes="gdn 56+8 list:0,5,9,gla 56+8 hardest:0.2,gdn 56+8 conv", tokens="4k")
    named = [cell.recipe.softmax_layers for cell in sweep.cells[1:]]
    assert named == ["list:0,5,9", "hardest:0.2", "none"]
    for value in ("none,list:0,5,9,hardest:0.2", ["none", "list:9,5,0", "hardest:.2"], '["none", "list:0,5,9", "hardest:0.2"]'):
        axis = build(mechanisms="gdn", softmax_layers=value, tokens="4k")
        assert [cell.recipe.softmax_layers for cell in axis.cells[1:]] == ["none", "list:0,5,9", "hardest:0.2"]
    with pytest.raises(ValueError, match=r"allowed: none, uniform:0\.2"):
        build(mechanisms="gdn", softmax_layers="odd", tokens="4k")
