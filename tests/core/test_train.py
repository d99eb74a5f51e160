import dataclasses
import hashlib
import json
import math
import pickle
import signal
import threading
import time

import pytest
import torch

from linear_core import optim
from linear_core.convert import convert, load_new_parameters, new_parameters
from linear_core.layerwise import twins
from linear_core.objectives import CrossEntropy, Sequences
from linear_core.optim import NewParameterOptimizer
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.speed import LayerCall, checkpoint_activations, compiled
from linear_core.step import Trainee, accumulate
from linear_core.train import Interrupted, NonFiniteError, train, train_cells
from sweeps.retries import cause_of
from tests.core import running, tiny
from tests.core.running import SETTINGS


def curve(folder):
    """Rows without the one number that depends on the clock."""
    rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def frozen_digest(model):
    new = new_parameters(model).keys()
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in new:
            digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_schedule():
    settings = TrainSettings()
    rate = [optim.learning_rate(step, settings, 2e-3) for step in range(2500)]
    assert rate[0] == 2e-5 and rate[49] == 1e-3 and rate[99] == 2e-3 == rate[100]
    assert rate[1300] == pytest.approx(1e-3) and rate[-1] == pytest.approx(0.0, abs=1e-8)
    floor = dataclasses.replace(settings, final_learning_rate=0.1, warmup_steps=0)
    assert optim.learning_rate(2499, floor, 2e-3) == pytest.approx(2e-4, rel=1e-4)
    assert TrainSettings().peak_learning_rate("lora") == 5e-4


@pytest.mark.parametrize("objective", ["ce", "kl", "layerwise"])
@pytest.mark.parametrize(
    "recipe, family", [("gdn 6+2 conv", "llama"), ("gla 6+2 lora", "qwen3"), ("gdn 6+2 conv mass", "qwen3")]
)
def test_training_moves_every_new_tensor_and_no_frozen_one(recipe, family, objective, tmp_path):
    model = running.model(recipe, family)
    frozen, start = frozen_digest(model), {n: p.detach().clone() for n, p in new_parameters(model).items()}
    result = train(
        model, dataclasses.replace(SETTINGS, objective=objective), running.tokens(tmp_path), folder=tmp_path, seed=1
    )
    assert frozen_digest(model) == frozen
    assert not [n for n, p in new_parameters(model).items() if torch.equal(p, start[n])]
    assert result.steps == 12 and result.tokens_seen == 12 * 128
    losses = [row["loss"] for row in curve(tmp_path)]
    assert result.loss == losses[-1] and (objective != "layerwise" or sum(losses[-3:]) < sum(losses[:3]))
    reloaded = running.model(recipe, family)
    load_new_parameters(reloaded, tmp_path / "new_parameters.safetensors")
    assert all(torch.equal(p, new_parameters(reloaded)[n]) for n, p in new_parameters(model).items())


def test_the_curve_does_not_depend_on_the_micro_batch(tmp_path):
    data = running.tokens(tmp_path)
    results = []
    for micro_batch in (4, 1, 3):
        folder = tmp_path / str(micro_batch)
        result = train(running.model(), SETTINGS, data, folder=folder, seed=1, micro_batch=micro_batch)
        assert (result.micro_batch, result.accumulation) == (micro_batch, math.ceil(4 / micro_batch))
        results.append([row["loss"] for row in curve(folder)])
    assert results[1] == pytest.approx(results[0], rel=1e-3) and results[2] == pytest.approx(results[0], rel=1e-3)


def test_progress_and_a_chain_of_objectives(tmp_path):
    settings = dataclasses.replace(SETTINGS, objective=f"layerwise:{5 * 128},ce:{7 * 128}")
    rows = []
    train(running.model(), settings, running.tokens(tmp_path), folder=tmp_path, seed=1, on_progress=rows.append)
    assert [row["done"] for row in rows] == [128 * (i + 1) for i in range(12)]
    assert {row["stage"] for row in rows} == {"train"} and rows[-1]["total"] == settings.tokens
    losses = [row["loss"] for row in rows]
    assert max(losses[:5]) < 3 < min(losses[5:])  # shares of a variance, then nats of 97 tokens
    assert rows[4]["learning_rate"] > rows[5]["learning_rate"]  # one schedule over the chain


@pytest.mark.parametrize("objective", ["ce", "layerwise"])
def test_cells_trained_together_equal_cells_trained_alone(objective, tmp_path):
    data, settings = running.tokens(tmp_path), dataclasses.replace(SETTINGS, objective=objective)
    recipes = [Recipe.parse(r) for r in ("gdn 6+2", "none 6+2", "gla 6+2 lora")]
    base = tiny.base()
    models = [convert(m, r, seed=3) for m, r in zip([base, *twins(base, 2)], recipes)]
    folders = [tmp_path / f"together{i}" for i in range(3)]
    results = train_cells(models, settings, data, folders=folders, seed=1)
    assert results[1].steps == 0 and results[1].loss is None  # nothing to train
    for i in (0, 2):
        alone = convert(tiny.base(), recipes[i], seed=3)
        train(alone, settings, data, folder=tmp_path / f"alone{i}", seed=1)
        assert curve(folders[i]) == curve(tmp_path / f"alone{i}")
        assert all(torch.equal(p, new_parameters(alone)[n]) for n, p in new_parameters(models[i]).items())
    assert (folders[1] / "new_parameters.safetensors").exists()


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path):
    model = running.model()
    after_step_4 = {}

    def poison(row):
        if row["step"] == 4:
            with torch.no_grad():
                next(p for n, p in new_parameters(model).items() if "layers.1." in n).fill_(float("nan"))
            after_step_4.update({n: p.detach().clone() for n, p in new_parameters(model).items()})

    with pytest.raises(
        NonFiniteError, match=r"step 5 \(layer 1: .*model.layers.1.*last good checkpoint: .*step-0000000"
    ) as e:
        train(
            model, SETTINGS, running.tokens(tmp_path), folder=tmp_path, seed=1, on_progress=poison, checkpoint_minutes=0
        )
    assert e.value.step == 5 and e.value.last_checkpoint.exists() and cause_of(e.value) == "nonfinite"
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)  # Ray sends it
    assert [row["step"] for row in curve(tmp_path)] == [0, 1, 2, 3, 4]
    for name, parameter in new_parameters(model).items():
        assert torch.equal(parameter.nan_to_num(7), after_step_4[name].nan_to_num(7))
    assert not (tmp_path / "new_parameters.safetensors").exists()


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path):
    base = tiny.base()
    models = [convert(m, Recipe.parse("gdn 6+2"), seed=3) for m in [base, *twins(base, 1)]]
    with torch.no_grad():
        next(iter(new_parameters(models[0]).values())).fill_(float("inf"))
    data, folders = running.tokens(tmp_path), [tmp_path / "bad", tmp_path / "good"]
    bad, good = train_cells(models, SETTINGS, data, folders=folders, seed=1)
    assert isinstance(bad, NonFiniteError) and bad.step == 0 and good.steps == 12
    train(running.model(), SETTINGS, data, folder=tmp_path / "alone", seed=1)
    assert curve(folders[1]) == curve(tmp_path / "alone") and not (folders[0] / "curve.jsonl").exists()


def test_cells_leave_a_pass_and_go_on_from_their_own_checkpoints(tmp_path):
    data, recipes, folders = running.tokens(tmp_path), ("gdn 6+2", "gla 6+2", "hedgehog 6+2"), [tmp_path / c for c in "abc"]
    rows = []

    def train_all(**more):
        base = tiny.base()
        models = [convert(m, Recipe.parse(r), seed=3) for m, r in zip([base, *twins(base, 2)], recipes)]
        return models, train_cells(models, SETTINGS, data, folders=folders, seed=1, on_progress=rows.append, **more)

    def done(cell):
        return sum(row["cell"] == cell for row in rows)

    _, ended = train_all(leaves=lambda i: i == 0 and done(0) == 4, should_stop=lambda: done(2) == 7)
    assert [(type(e), e.step, e.saved.name) for e in ended] == [
        (Interrupted, 4, "step-00000004"), (Interrupted, 7, "step-00000007"), (Interrupted, 7, "step-00000007")
    ]  # fmt: skip
    rows.clear()
    models, ended = train_all(leaves=lambda i: i == 1 and done(0) == 1)  # told while it waits for the first
    assert isinstance(ended[1], Interrupted) and ended[1].step == 7 and ended[1].saved.name == "step-00000007"
    assert [ended[0].resumed_from, ended[2].resumed_from] == [4, 7] and (done(0), done(1), done(2)) == (8, 0, 5)
    for i in (0, 2):
        alone = running.model(recipes[i])
        train(alone, SETTINGS, data, folder=tmp_path / f"alone{i}", seed=1)
        assert curve(folders[i]) == curve(tmp_path / f"alone{i}")
        assert all(torch.equal(p, new_parameters(alone)[n]) for n, p in new_parameters(models[i]).items())


def recomputed(model):
    """Share of the layers that are run again in the backward pass."""
    calls = [layer.forward for layer in model.model.layers]
    return sum(isinstance(call, LayerCall) and call._recomputes for call in calls) / len(calls)


class SmallMemory(torch.nn.Module):
    """Stands in for a layer's MLP on a small card: more than ``rows`` rows do not fit, nor does any without checkpointing."""

    def __init__(self, inner, rows, model=None):
        super().__init__()
        self.inner, self.rows, self.model = inner, rows, [model]

    def forward(self, x):
        if len(x) > self.rows or (self.model[0] is not None and recomputed(self.model[0]) < 1):
            raise torch.OutOfMemoryError("CUDA out of memory (of this test)")
        return self.inner(x)


def test_running_out_of_memory_halves_and_then_checkpoints_activations(tmp_path):
    data = running.tokens(tmp_path)
    train(running.model(), SETTINGS, data, folder=tmp_path / "plain", seed=1)
    expected = [row["loss"] for row in curve(tmp_path / "plain")]
    for rows, tight, ends_with in ((2, False, (2, 2, 0)), (1, True, (1, 4, 1))):
        model, folder = running.model(), tmp_path / f"small{rows}"
        layer = model.model.layers[1]
        layer.mlp = SmallMemory(layer.mlp, rows, model if tight else None)
        result = train(model, SETTINGS, data, folder=folder, seed=1)
        assert (result.micro_batch, result.accumulation, result.activation_checkpointing) == ends_with
        assert [row["loss"] for row in curve(folder)] == pytest.approx(expected, rel=1e-3)
        assert not model.training and not recomputed(model) and "forward" not in vars(layer)
    model = running.model()
    model.model.layers[1].mlp = SmallMemory(model.model.layers[1].mlp, 0)
    with pytest.raises(torch.OutOfMemoryError):
        train(model, SETTINGS, data, folder=tmp_path / "hopeless", seed=1)


def test_recomputed_and_compiled_layers_give_the_same_gradients():
    model = tiny.linearized("none 6+2 lora")
    trainee = Trainee(model, NewParameterOptimizer(new_parameters(model), SETTINGS, 1e-3))
    ids = tiny.tokens(48, batch=2)
    batch = Sequences(ids, ids.roll(-1, 1), None, ids.numel(), ids.numel())

    def gradients():
        forwards.clear()
        loss = accumulate([trainee], CrossEntropy(), batch, 2)[0]
        return {"loss": loss, **{n: p.grad.clone() for n, p in new_parameters(model).items()}}

    forwards = []
    expected = gradients()
    first = model.model.layers[0].self_attn  # is never compiled
    handle = first.register_forward_hook(lambda *_: forwards.append(1))
    checkpoint_activations(model)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert len(forwards) == 2, "once more in the backward pass"
    with compiled([model], backend="aot_eager"):
        torch.testing.assert_close(gradients(), expected)
        assert len(forwards) == 2
    checkpoint_activations(model, 0.5)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert recomputed(model) == 0.5
    checkpoint_activations(model, 0)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert len(forwards) == 1
    handle.remove()


def test_told_to_stop_it_saves_and_goes_on_as_if_nothing_had_been(tmp_path):
    data = running.tokens(tmp_path)
    train(running.model(), SETTINGS, data, folder=tmp_path / "straight", seed=1)
    asked = []

    def should_stop():
        asked.append(1)
        return len(asked) == 6 * 4 + 3  # in the middle of step 6, between its micro-batches

    with pytest.raises(Interrupted) as e:
        train(running.model(), SETTINGS, data, folder=tmp_path / "cut", seed=1, micro_batch=1, should_stop=should_stop)
    assert cause_of(e.value) == "preempted" and str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    assert e.value.step == 6 and e.value.saved.name == "step-00000006"
    result = train(running.model(), SETTINGS, data, folder=tmp_path / "cut", seed=1, micro_batch=1)
    assert result.resumed_from == 6 and result.steps == 12
    losses = [[row["loss"] for row in curve(tmp_path / name)] for name in ("straight", "cut")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_sigterm_saves_within_seconds(tmp_path):
    data, long = running.tokens(tmp_path), dataclasses.replace(SETTINGS, tokens=10**6)
    before = signal.getsignal(signal.SIGTERM)
    sent = []

    def send(row):
        if row["step"] == 3:
            sent.append(time.monotonic())
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="after 4 steps"):
        train(running.model(), long, data, folder=tmp_path, seed=1, on_progress=send)
    assert time.monotonic() - sent[0] < 3 and signal.getsignal(signal.SIGTERM) is before


def test_training_works_outside_the_main_thread(tmp_path):
    results = []
    arguments = (running.model(), SETTINGS, running.tokens(tmp_path))
    thread = threading.Thread(target=lambda: results.append(train(*arguments, folder=tmp_path, seed=1)))
    thread.start()
    thread.join()
    assert results[0].steps == 12
