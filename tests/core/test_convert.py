"""Conversion: what is new, what is frozen, counts, files, refusals."""

import dataclasses
import json

import pytest
import torch

from linear_core.convert import (
    convert,
    load_new_parameters,
    new_parameters,
    parameter_count,
    read_recipe,
    save_new_parameters,
    unconvert,
)
from linear_core.inspect import inspect_recipe
from linear_core.models import REGISTRY, build, load, resolve
from linear_core.recipe import Recipe, parse_budget, parse_layers
from tests.core.tiny import LLAMA, base, linearized, randomised, tokens

# recipe section 3: gla, kgla and gdn, gla+conv, gdn+conv, gla+lora, gdn+lora, in millions
PUBLISHED_COUNTS = {
    "llama3.1-8b": (4.33, 8.52, 6.09, 10.29, 11.14, 15.34),
    "qwen3-8b-base": (4.87, 9.59, 6.86, 11.58, 12.53, 17.25),
    "qwen3-0.6b-base": (1.43, 1.89, 2.47, 2.92, 3.73, 4.19),
    "qwen3-1.7b-base": (1.89, 2.81, 2.92, 3.84, 5.10, 6.02),
    "qwen3-4b-base": (3.98, 6.93, 5.97, 8.92, 9.88, 12.83),
    "qwen3-14b-base": (6.76, 14.95, 9.34, 17.53, 17.24, 25.44),
    "qwen3-32b": (14.16, 35.13, 20.05, 41.03, 34.08, 55.05),
}
COLUMNS = ("gla 56+8", "gdn 56+8", "gla 56+8 conv", "gdn 56+8 conv", "gla 56+8 lora", "gdn 56+8 lora")


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_parameter_counts_are_the_papers(name):
    shape = REGISTRY[name].shape
    counts = tuple(round(parameter_count(shape, Recipe.parse(recipe)) / 1e6, 2) for recipe in COLUMNS)
    assert counts == PUBLISHED_COUNTS[name]
    assert parameter_count(shape, Recipe.parse("kgla 56+8")) == parameter_count(shape, Recipe.parse("gdn 56+8"))


def test_hedgehog_counts():
    assert round(parameter_count(REGISTRY["llama3.1-8b"].shape, Recipe.parse("hedgehog 0+0")) / 1e6, 2) == 10.57
    assert round(parameter_count(REGISTRY["qwen3-8b-base"].shape, Recipe.parse("hedgehog 0+0")) / 1e6, 2) == 11.89


def test_a_32b_model_converts_on_the_meta_device_and_counts_agree():
    shape = REGISTRY["qwen3-32b"].shape
    model = convert(build(shape), Recipe.parse("gdn 56+8 conv"))
    assert sum(p.numel() for p in new_parameters(model).values()) == parameter_count(
        shape, Recipe.parse("gdn 56+8 conv")
    )
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize("recipe", ["gdn 6+3 conv mass", "hedgehog 6+3", "gla 5+0 lora", "none 6+3 lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_only_the_new_parameters_train_and_unconvert_restores_the_base(recipe, family):
    original = base(family)
    names = dict(original.named_parameters())
    model = convert(base(family), Recipe.parse(recipe))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == set(new_parameters(model))
    assert all(p.dtype == torch.float32 for p in new_parameters(model).values())
    restored = unconvert(randomised(model))
    assert type(restored) is type(original)
    assert dict(restored.named_parameters()).keys() == names.keys()
    ids = tokens(20)
    with torch.no_grad():
        assert torch.equal(restored(ids).logits, original(ids).logits)
    assert type(convert(restored, Recipe.parse("gla 5+0"))).__name__.startswith("Linearized")


def test_a_seed_draws_the_same_start_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    first = new_parameters(convert(base(), Recipe.parse("gdn 6+3"), seed=3))
    after = torch.rand(1)
    second = new_parameters(convert(base(), Recipe.parse("gdn 6+3"), seed=3))
    other = new_parameters(convert(base(), Recipe.parse("gdn 6+3"), seed=4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    base()
    torch.manual_seed(5)
    base()
    assert after.shape == (1,)


def test_new_parameters_save_and_load(tmp_path):
    model = linearized("gdn 6+3 conv mass")
    save_new_parameters(model, tmp_path / "new_parameters.safetensors")
    assert read_recipe(tmp_path / "new_parameters.safetensors") == model.recipe
    fresh = convert(base(), model.recipe)
    load_new_parameters(fresh, tmp_path / "new_parameters.safetensors")
    ids = tokens(20)
    with torch.no_grad():
        assert torch.equal(fresh(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"another recipe: .*window 6 ≠ 5"):
        load_new_parameters(convert(base(), Recipe.parse("gdn 5+3 conv mass")), tmp_path / "new_parameters.safetensors")
    with pytest.raises(ValueError, match=r"has shape|does not fit"):
        wider = build(dataclasses.replace(LLAMA, hidden=64), device="cpu")
        load_new_parameters(convert(wider, model.recipe), tmp_path / "new_parameters.safetensors")


def test_refusals_say_what_is_allowed(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ValueError, match=r"supported: LlamaForCausalLM, Qwen3ForCausalLM"):
        convert(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=10)), Recipe())
    with pytest.raises(ValueError, match="linearized already"):
        convert(linearized("gla 5+0"), Recipe())
    with pytest.raises(ValueError, match=r"layers \[7\]; the model has 0 … 1"):
        convert(base(), Recipe(softmax_layers="list:0,7"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*supported: llama"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "x.Y"}}')
    with pytest.raises(ValueError, match=r"remote code is off.*GOLINEAR_REMOTE_CODE=/"):
        resolve(str(tmp_path))
    with pytest.raises(ValueError, match=r"not known; allowed: qwen3-0\.6b-base"):
        resolve("gpt-7")


@pytest.mark.parametrize(
    "values,message",
    [
        ({"mechanism": "mamba"}, "allowed: none, hedgehog"),
        ({"adaptation": "dora"}, "allowed: none, conv, lora"),
        ({"merge": "max"}, "allowed: sum, shared, mass"),
        ({"window": 0, "sinks": 4}, "sinks but no window"),
        ({"window": -1}, "whole number ≥ 0"),
        ({"mechanism": "hedgehog", "merge": "sum"}, "needs merge shared or mass"),
        ({"mechanism": "gdn", "merge": "shared"}, "merge shared is hedgehog's"),
        ({"mechanism": "none", "window": 0, "sinks": 0}, "exact path only"),
        ({"mechanism": "none", "adaptation": "conv"}, "no linear path"),
        ({"softmax_layers": "some"}, "allowed: none, uniform:0.2"),
        ({"gate_bias": float("nan")}, "finite"),
    ],
)
def test_recipes_that_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**values)


def test_a_recipe_is_what_its_name_says():
    for text in ("gdn 56+8 conv mass gate-bias 3 read-scale", "gla 64+0 softmax uniform:0.2", "hedgehog 0+0", "softmax"):
        assert Recipe.parse(text).name == text
    assert Recipe.parse("gdn read-scale 56+8 gate-bias 2.5").gate_bias == 2.5
    with pytest.raises(ValueError, match="wants a number behind it"):
        Recipe.parse("gdn 56+8 gate-bias")


def test_budgets_and_layers():
    assert parse_budget("56+8") == (56, 8)
    for wrong in ("56", "8-8", "-1+0", "a+b", "0+8", "5.5+1", "", None):
        with pytest.raises(ValueError, match="allowed"):
            parse_budget(wrong)
    assert parse_layers("uniform:0.2", 30) == {2, 7, 12, 17, 22, 27}
    assert parse_layers("list:0,5", 6) == {0, 5}
    for wrong in ("uniform:0", "uniform:1.5", "list:", "hardest:nan"):
        with pytest.raises(ValueError, match="allowed"):
            Recipe(softmax_layers=wrong)


def test_layers_that_keep_softmax_attention_have_one_spelling():
    for text, same in (("list:9,0,5,5", "list:0,5,9"), ("hardest:.20", "hardest:0.2"), ("uniform:1.0", "uniform:1")):
        recipe = Recipe.parse(f"gdn 6+3 {text} conv")
        assert recipe.softmax_layers == same and recipe == Recipe.parse(recipe.name)
    with pytest.raises(ValueError, match=r"hardest:0\.2"):
        Recipe.parse("gdn hardest:2")
    shape, half = REGISTRY["smollm2-135m"].shape, "gdn 56+8 {}:0.5"
    hardest, uniform = (inspect_recipe(shape, Recipe.parse(half.format(kind))) for kind in ("hardest", "uniform"))
    assert hardest["linearized_layers"] == 15 and hardest["by_length"] == uniform["by_length"]


def test_a_model_named_in_the_environment_may_run_its_code(tmp_path, monkeypatch):
    base().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "code.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM):\n    said = 'hello'\n"
    )
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "code.Own"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    for named in ("", "own", f"{tmp_path}/other"):
        monkeypatch.setenv("GOLINEAR_REMOTE_CODE", named)
        with pytest.raises(ValueError, match="remote code is off"):
            load(str(tmp_path / "own"))
    monkeypatch.setenv("GOLINEAR_REMOTE_CODE", f"org/other, {tmp_path}/own/")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert load(str(tmp_path / "own")).said == "hello"
