"""The torch-free counts that plans and tables use, against the real modules and against the paper."""

from __future__ import annotations

import dataclasses

import pytest

from linear_core.inspect import inspect_recipe
from linear_core.models import REGISTRY, Shape
from linear_core.recipe import Recipe
from sweeps import cost

SHAPE = Shape(family="qwen3", hidden=48, layers=4, heads=6, kv_heads=2, head_dim=16, intermediate=64, vocab=64,
              tied=True, max_positions=512, rope_theta=1e4, rms_eps=1e-6)  # fmt: skip
RECIPES = [
    *(f"{mechanism} 8+2" for mechanism in ("none", "hedgehog", "gla", "kgla", "gdn", "gdn_scalar")),
    "gdn 0+0", "gdn 8+2 conv", "gla 8+0 lora", "gdn 8+2 mass", "hedgehog 0+0", "none 8+2 lora",
]  # fmt: skip


@pytest.mark.parametrize("recipe", [
    *map(Recipe.parse, RECIPES),
    dataclasses.replace(Recipe.parse("gdn 8+2 conv"), softmax_layers="list:0,2"),
    dataclasses.replace(Recipe.parse("gdn 8+2"), softmax_layers="uniform:0.5"),
    dataclasses.replace(Recipe.parse("gdn 8+2"), learned_read_scale=True),
    dataclasses.replace(Recipe.parse("gdn 8+2 mass"), learned_read_scale=True),
], ids=lambda recipe: recipe.name)  # fmt: skip
def test_counts_and_bytes_are_those_of_the_modules(recipe: Recipe) -> None:
    real = inspect_recipe(SHAPE, recipe)
    assert cost.new_parameters(SHAPE, recipe) == real["new_parameters"]
    for row in real["by_length"]:
        assert cost.cache_bytes(SHAPE, recipe, row["length"]) == pytest.approx(row["cache_bytes"], rel=0.02)


@pytest.mark.parametrize(("model", "recipe", "millions"), [
    ("llama3.1-8b", "gla 56+8", 4.33), ("llama3.1-8b", "gdn 56+8", 8.52), ("llama3.1-8b", "gdn 56+8 conv", 10.29),
    ("llama3.1-8b", "gla 56+8 lora", 11.14), ("llama3.1-8b", "hedgehog 0+0", 10.57), ("qwen3-8b-base", "hedgehog 0+0", 11.89),
    ("qwen3-0.6b-base", "gdn 56+8 conv", 2.92), ("qwen3-4b-base", "gdn 56+8 lora", 12.83), ("qwen3-32b", "gdn 56+8", 35.13),
])  # fmt: skip
def test_the_papers_parameter_column(model: str, recipe: str, millions: float) -> None:
    assert cost.new_parameters(REGISTRY[model].shape, Recipe.parse(recipe)) / 1e6 == pytest.approx(millions, abs=0.005)


def test_full_attention_and_layers_kept_by_hardness() -> None:
    base = Recipe(mechanism="softmax", window=0, sinks=0)
    assert cost.cache_bytes(SHAPE, base, 1000) == 4 * 2 * 2 * 16 * 2 * 1000 and cost.new_parameters(SHAPE, base) == 0
    hardest = dataclasses.replace(Recipe.parse("gdn 8+2"), softmax_layers="hardest:0.5")
    uniform = dataclasses.replace(hardest, softmax_layers="uniform:0.5")
    assert cost.new_parameters(SHAPE, hardest) == cost.new_parameters(SHAPE, uniform)
