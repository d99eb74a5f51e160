"""An 8-bit backbone (torchao) on a CUDA device trains to about what a bfloat16 one does, with compiled layers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from linear_core.convert import convert
from linear_core.models import load
from linear_core.recipe import Recipe
from linear_core.train import train
from tests.core import rank_worker, running
from tests.core.rank_worker import losses
from tests.core.texts import byte_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("recipe", ["gdn 56+8 conv", "none 56+8 lora"])
def test_it_trains_to_about_the_same(recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torchao")
    rank_worker.base("cuda").save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    data, found = running.tokens(tmp_path / "texts"), {}
    for backbone in ("full", "int8"):
        model = load(str(tmp_path / "base"), device="cuda", backbone=backbone)
        weight = model.model.layers[0].mlp.up_proj.weight
        settings = dataclasses.replace(rank_worker.settings("cuda")["ce"], backbone=backbone)
        linearized = convert(model, Recipe.parse(recipe), seed=3)
        train(linearized, settings, data, folder=tmp_path / backbone, seed=1)
        found[backbone] = losses(tmp_path / backbone)
    assert weight.qdata.dtype == torch.int8 and weight.qdata.is_cuda
    assert model.lm_head.weight.dtype == torch.bfloat16 and not hasattr(model.lm_head.weight, "qdata")
    assert found["int8"] == pytest.approx(found["full"], rel=0.02)
    sys.stderr.write(f"{recipe}: {found}\n")
    assert found["int8"] != found["full"] and "could not be recorded" not in caplog.text
