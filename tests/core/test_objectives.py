import dataclasses

import pytest
import torch
from torch.nn import functional

from linear_core import objectives
from linear_core.convert import attention_modules, base_attention, convert, new_parameters, unconvert
from linear_core.layerwise import Layerwise, twins
from linear_core.objectives import Sequences, make_objective
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from tests.core import running, tiny

NAMES = ("ce", "kl", "layerwise")
ISOLATED = TrainSettings(tokens=4 * 128, sequence_length=128, batch_size=4, isolate_documents=True)


@pytest.fixture
def batch(tmp_path):
    return Sequences.of(running.tokens(tmp_path).batch(0, running.SETTINGS, seed=1), torch.device("cpu"))


def gradients(models, name, batch, micro_batch):
    for model in models:
        model.zero_grad()
    objective = make_objective(name)
    objective.prepare(models, batch, micro_batch)
    losses = sum(torch.stack(objective.backward(models, part)) for part in batch.split(micro_batch))
    return losses, [{n: p.grad.clone() for n, p in new_parameters(m).items() if p.grad is not None} for m in models]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up_to_the_batch(name, family, tmp_path):
    """4 × 1 equals 4, with isolated documents too: then rows differ in how many tokens they predict."""
    batch = Sequences.of(running.tokens(tmp_path).batch(0, ISOLATED, seed=1), torch.device("cpu"))
    models = [tiny.randomised(running.model("gdn 6+2 conv", family))]
    whole, (one,) = gradients(models, name, batch, 4)
    for micro_batch in (1, 3):
        split, (parts,) = gradients(models, name, batch, micro_batch)
        torch.testing.assert_close(split, whole)
        assert one.keys() == parts.keys() == new_parameters(models[0]).keys()
        for parameter in one:
            torch.testing.assert_close(parts[parameter], one[parameter], rtol=1e-3, atol=1e-6)


def test_ce_is_the_models_own_loss(batch):
    model = tiny.linearized("gla 6+2")
    expected = model(input_ids=batch.input_ids, labels=batch.input_ids).loss
    (loss,) = make_objective("ce").backward([model], batch)
    torch.testing.assert_close(loss, expected.detach())


def test_kl_is_to_the_frozen_base(batch):
    model = tiny.linearized("gdn 6+2 lora")
    ours = model(input_ids=batch.input_ids).logits.log_softmax(-1)
    (loss,) = make_objective("kl").backward([model], batch)
    base = unconvert(model)(input_ids=batch.input_ids).logits.log_softmax(-1)
    counted = batch.labels != -100
    torch.testing.assert_close(
        loss, functional.kl_div(ours, base, log_target=True, reduction="none").sum(-1)[counted].mean()
    )


def test_chunks_of_logits_change_nothing(batch, monkeypatch):
    model = tiny.linearized("gdn 6+2")
    for name in ("ce", "kl"):
        whole, (one,) = gradients([model], name, batch, 4)
        monkeypatch.setattr(objectives, "TOKENS_AT_ONCE", 50)
        chunked, (parts,) = gradients([model], name, batch, 4)
        torch.testing.assert_close(chunked, whole)
        for parameter in one:
            torch.testing.assert_close(parts[parameter], one[parameter], rtol=1e-3, atol=1e-6)
        monkeypatch.undo()


def layer_errors(model, ids):
    """The definition, spelled out: each layer on the base's own input, error over variance, mean over layers."""
    seen = []

    def keep(_module, _inputs, arguments, output):
        seen.append((arguments["hidden_states"], arguments["position_embeddings"], arguments["layout"], output[0]))

    modules = attention_modules(model)
    handles = [m.register_forward_hook(keep, with_kwargs=True) for m in modules]
    with torch.no_grad(), base_attention(model):
        model(input_ids=ids, paths="base")
    for handle in handles:
        handle.remove()
    errors = []
    for module, (h, position_embeddings, layout, y) in zip(modules, seen):
        ours = module(h, position_embeddings, layout=dataclasses.replace(layout, paths="hybrid"))[0]
        errors.append((y - ours).square().mean() / y.var(unbiased=False))
    return torch.stack(errors).mean()


@pytest.mark.parametrize("recipe, family", [("gdn 6+2", "qwen3"), ("gla 6+2 lora", "llama")])
def test_layerwise_is_the_mean_error_on_the_bases_inputs(recipe, family, batch):
    model = tiny.linearized(recipe, family)
    losses, _ = gradients([model], "layerwise", batch, 4)
    torch.testing.assert_close(losses[0], layer_errors(model, batch.input_ids).detach())


def test_a_layers_loss_reaches_its_own_parameters_only(batch):
    """The gradient of one layer is that of its own error: moving another layer leaves it bit for bit."""
    model = tiny.linearized("gdn 6+2")
    _, (before,) = gradients([model], "layerwise", batch, 4)
    with torch.no_grad():
        next(p for n, p in new_parameters(model).items() if "layers.0." in n).add_(1.0)
    _, (after,) = gradients([model], "layerwise", batch, 4)
    same = {n for n in before if torch.equal(before[n], after[n])}
    assert same == {n for n in before if "layers.1." in n}


def test_several_cells_get_what_each_gets_alone(batch):
    """One forward of the base for cells that differ in mechanism, budget, adaptation and kept layers."""
    base = tiny.base("qwen3")
    recipes = [Recipe.parse("gdn 6+2"), Recipe.parse("gla 4+0 conv"), Recipe.parse("gdn 8+0 lora")]
    recipes.append(Recipe(mechanism="gla", window=6, sinks=2, softmax_layers="list:0"))
    models = [tiny.randomised(convert(m, r)) for m, r in zip([base, *twins(base, 3)], recipes)]
    assert len({m.model.layers[0].mlp.up_proj.weight.data_ptr() for m in models}) == 1
    for order in (models, models[::-1]):
        together, grads = gradients(order, "layerwise", batch, 2)
        for model, loss, grad in zip(order, together, grads):
            alone, (own,) = gradients([model], "layerwise", batch, 2)
            assert torch.equal(alone[0], loss) and own.keys() == grad.keys()
            assert all(torch.equal(own[n], grad[n]) for n in own)


def test_layerwise_keeps_to_isolated_documents(tmp_path):
    batch = Sequences.of(running.tokens(tmp_path).batch(0, ISOLATED, seed=1), torch.device("cpu"))
    model = tiny.linearized("gdn 0+0")
    losses, _ = gradients([model], "layerwise", batch, 1)
    ids = batch.document_ids[0]
    changed = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    changed.input_ids[0, ids == 0] = 5  # the first document changes: the rest of the row must not
    objective = Layerwise()
    objective.prepare([model], batch, 4)
    seen = []
    for sequences in (batch, changed):
        outputs = []
        handle = attention_modules(model)[1].register_forward_hook(
            lambda _m, _i, out, kept=outputs: kept.append(out[0])
        )
        objective.backward([model], sequences)
        handle.remove()
        seen.append(outputs)
    for before, after in zip(*seen):
        torch.testing.assert_close(before[0, ids > 0], after[0, ids > 0])
    assert torch.isfinite(losses).all()
