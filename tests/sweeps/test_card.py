"""The model card of a cell: what the store knows, nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from sweep_helpers import finish, pinned

from linear_core.card import model_card
from linear_core.models import REGISTRY
from linear_core.recipe import Recipe
from sweeps.card import card_of
from sweeps.grids import ablation
from sweeps.opening import Opened

PROVENANCE = {
    "training": {"loss": 2.5, "tokens_per_second": 350.0}, "hardware": "NVIDIA H200", "commit": "0123456789abcdef",
    "versions": {"golinear": "0.1.0", "torch": "2.13.0"}, "at": "2026-11-30T08:00:00+00:00", "train_seconds": 90.0,
}  # fmt: skip


def test_card_of_a_cell(store):
    tasks = "lambada_openai:40,niah_single_1@512:8,mmlu"
    sweep = pinned(ablation("smollm2-135m", "gdn", "56+8", "conv", tasks=tasks), reasons={})
    base, cell = sweep.cells
    finish(store, sweep, base, {"lambada_openai": 0.325, "mmlu": 0.3})
    finish(store, sweep, cell, {"lambada_openai": 0.25, "niah_single_1": 0.0, "mmlu": None}, **PROVENANCE)
    card, facts = card_of(Opened(None, None, REGISTRY["smollm2-135m"], cell.recipe, cell))
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n")
    assert "| lambada_openai | acc, % ↑ | 32.5 ± 1 | 25 ± 1 | −7.50 |" in card
    assert "| niah_single_1@512 | acc, % ↑ | – | 0 ± 1 |  |" in card, "no base score: no gap"
    assert "| mmlu | acc, % ↑ | 30 ± 1 | – |  |" in card and "mmlu: its data is not here" in card
    assert "1.5 minutes on NVIDIA H200, 350 tokens/s" in card and "2.500" in card and cell.train_key in card
    assert "Up to 64 tokens it equals the base model" in card and facts == {"train_key": cell.train_key}


@pytest.mark.parametrize("text", ["none 56+8", "gla 0+0", "gdn 56+8 lora", "gdn 56+8 mass uniform:0.2", "hedgehog 64+0"])
def test_every_recipe_has_a_card(text):
    recipe = Recipe.parse(text)
    for delta in (False, True):
        card = model_card(REGISTRY["llama3.1-8b"], recipe, delta=delta)
        assert "None: the new parameters have their start values" in card and "Not measured" in card
        assert "Built with Llama" in card and "It is not trained" in card
        assert ("load_linearized" in card) == delta
        assert ("window 0" in card) == (recipe.window == 0)


def test_a_folder_that_is_no_registered_model_keeps_its_name():
    base = dataclasses.replace(REGISTRY["smollm2-135m"], name="mine", source="mine", licence="unknown")
    assert "base_model: mine\n" in model_card(base, Recipe())
