"""An 8-bit frozen backbone: the same cell on less memory, under its own key; refused where its package is missing."""

import dataclasses
import importlib.util

import pytest
import torch
from sweep_helpers import pinned

from linear_core import models
from linear_core.convert import convert, new_parameters
from linear_core.evaluate.windows import base_fingerprint
from linear_core.models import whole
from linear_core.ranks import load
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.train import train
from sweeps import cost
from sweeps.cell import Cell, Placement, diff
from sweeps.cost import Machine
from sweeps.grids import ablation
from sweeps.plan import make_plan
from sweeps.stages import Bench
from sweeps.store import Store
from tests.core import running, tiny
from tests.core.running import SETTINGS
from tests.core.texts import byte_tokenizer

INT8 = dataclasses.replace(SETTINGS, backbone="int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny.base().save_pretrained(made)
    byte_tokenizer().save_pretrained(made)
    return str(made)


@pytest.mark.parametrize("recipe", ["gdn 6+2 conv", "none 6+2 lora"])
def test_it_trains_to_about_the_same(folder, recipe, tmp_path):
    data, losses = running.tokens(tmp_path), {}
    for settings in (SETTINGS, INT8):
        base = load(folder, device="cpu", sharded=False, backbone=settings.backbone)
        model = convert(base, Recipe.parse(recipe), seed=3)
        frozen = whole(base.model.layers[1].mlp.up_proj.weight).clone()
        losses[settings.backbone] = train(model, settings, data, folder=tmp_path / settings.backbone, seed=1).loss
        assert torch.equal(whole(base.model.layers[1].mlp.up_proj.weight), frozen)
        assert all(p.dtype == torch.float32 for p in new_parameters(model).values())
    assert losses["int8"] == pytest.approx(losses["full"], rel=0.02) and losses["int8"] != losses["full"]
    assert base.model.layers[0].mlp.up_proj.weight.qdata.dtype == torch.int8
    assert base.lm_head.weight.dtype == torch.float32 and not hasattr(base.lm_head.weight, "qdata")
    assert base_fingerprint(model) != base_fingerprint(tiny.base())


def test_it_is_part_of_the_key_and_the_old_keys_stay():
    cell = Cell(base="smollm2-135m", recipe=Recipe.parse("gdn 56+8"), train=TrainSettings(), revision="r", data="d")
    other = dataclasses.replace(cell, train=TrainSettings(backbone="int8"))
    assert "backbone" not in cell.inputs["train"] and diff(cell, other) == ["train.backbone (default) → int8"]
    with pytest.raises(ValueError, match="backbone 'int3' is not known; allowed: full, int8"):
        TrainSettings(backbone="int3")


def test_a_worker_keeps_one_backbone_at_a_time(folder):
    cell = Cell(base=folder, recipe=Recipe.parse("gdn 6+2"), train=SETTINGS, revision="r", data="d")
    bench, other = Bench(), dataclasses.replace(cell, train=INT8)
    plain = bench.fresh(cell)
    assert bench.holds(cell) and not bench.holds(other) and bench.base_model(folder) is plain
    assert hasattr(bench.fresh(other).model.layers[0].mlp.up_proj.weight, "qdata")
    assert bench.holds(other) and not hasattr(bench.base_model(folder, "full").lm_head.weight, "qdata")


def test_without_its_package_the_plan_says_so(home, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package torchao: pip install 'golinear\[int8\]'"):
        models.load("smollm2-135m", backbone="int8")
    sweep = pinned(ablation("smollm2-135m", "gdn", "56+8", train=INT8))
    monkeypatch.setattr("sweeps.plan.why_not_at_hand", lambda *_: "")
    plan = make_plan(sweep, Store(), Machine(memory=1e12, disk_free=1e12))
    assert "needs the package torchao" in plan.items[-1].reason and plan.items[-1].action == "refuse"


def test_what_it_saves():
    shape, placement = models.REGISTRY["qwen3-32b"].shape, Placement(num_gpus=1)
    full, int8 = (
        cost.minimum_memory(shape, Recipe.parse("gdn 56+8"), TrainSettings(backbone=b), placement) / 2**30
        for b in ("full", "int8")
    )
    assert 60 < full < 80 and 28 < full - int8 < 30, "a byte less for each of 31 billion weights of the layers"
