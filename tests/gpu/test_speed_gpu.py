"""A step recorded in a CUDA graph is the eager step, also after the batch has changed its size; on a CUDA device."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from linear_core.bench.train import TINY, random_batch
from linear_core.convert import convert, new_parameters
from linear_core.models import build
from linear_core.objectives import make_objective
from linear_core.optim import NewParameterOptimizer
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.speed import FastStep, checkpoint_activations, compiled
from linear_core.step import Trainee, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = (2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 2)


@pytest.mark.parametrize("objective", ["ce", "kl", "layerwise"])
def test_recorded_steps_are_eager_steps(objective: str) -> None:
    shape = dataclasses.replace(TINY, hidden=256, head_dim=64)
    torch.manual_seed(0)
    models = [convert(build(shape, device="cuda", dtype=torch.bfloat16), Recipe.parse("gla 20+4"))]
    models.append(copy.deepcopy(models[0]))
    runs = []
    for model, step in zip(models, (train_step, FastStep())):
        trainee = Trainee(model, NewParameterOptimizer(new_parameters(model), TrainSettings(tokens=10**6), 1e-3))
        trainee.optimizer.set_rate(100)
        chosen = make_objective(objective)
        chosen.prepare([model], random_batch(shape, 2, 128, "cuda"), 2)
        runs.append(
            [step([trainee], chosen, random_batch(shape, rows, 128, "cuda"), rows)[0, 0].item() for rows in ROWS]
        )
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=2e-3, atol=0)
    assert len(set(runs[0])) > len(ROWS) // 2


def test_recomputed_compiled_and_recorded_steps_are_plain_steps(caplog: pytest.LogCaptureFixture) -> None:
    shape = dataclasses.replace(TINY, hidden=256, head_dim=64, layers=4)
    torch.manual_seed(0)
    models = [convert(build(shape, device="cuda", dtype=torch.bfloat16), Recipe.parse("gdn 20+4"))]
    models.append(copy.deepcopy(models[0]))
    checkpoint_activations(models[1], 0.5)
    losses = []
    for model, step in zip(models, (train_step, FastStep())):
        trainee = Trainee(model, NewParameterOptimizer(new_parameters(model), TrainSettings(tokens=10**6), 1e-3))
        trainee.optimizer.set_rate(100)
        with compiled([model] if isinstance(step, FastStep) else []):
            batches, chosen = [random_batch(shape, 2, 128, "cuda")] * 8, make_objective("ce")
            losses.append([step([trainee], chosen, batch, 2)[0, 0].item() for batch in batches])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=5e-3, atol=0)
    assert "could not be recorded" not in caplog.text
