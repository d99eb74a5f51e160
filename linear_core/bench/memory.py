"""What one training step takes above the model and its optimiser: the measurement behind `golinear plan --probe`.

    golinear bench memory --model smollm2-135m --recipe "gdn 56+8" --sequence-length 1024

One sequence, cross-entropy, uncompiled; random weights, made on the device in the training precision, so that nothing has
to be downloaded first. Prints JSON: step_bytes (per sequence of that length), weights_bytes. On CUDA the allocator's peak; on a
CPU the process's resident memory, looked at every few milliseconds, so that tiny models give little more than noise.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from linear_core.bench.train import random_batch
from linear_core.convert import convert, new_parameters
from linear_core.models import Shape, build, resolve
from linear_core.objectives import make_objective
from linear_core.optim import NewParameterOptimizer
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.step import Trainee, train_step

LOOK_SECONDS = 0.002


def step_memory(shape: Shape, recipe: Recipe, length: int, device: str) -> dict[str, int]:
    """One training step on one sequence of ``length`` tokens. Returns {"step_bytes", "weights_bytes"}.

    Raises torch.OutOfMemoryError when it does not fit without activation checkpointing.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = convert(build(shape, device=device, dtype=dtype), recipe)
    settings = TrainSettings(tokens=length, sequence_length=length)
    trainee = Trainee(model, NewParameterOptimizer(new_parameters(model), settings, 1e-4))
    trainee.optimizer.set_rate(0)
    batch, objective = random_batch(shape, 1, length, device), make_objective("ce")
    objective.prepare([model], batch, 1)
    weights = sum(parameter.nbytes for parameter in model.parameters())

    def step() -> Any:
        return train_step([trainee], objective, batch, 1)

    return {"step_bytes": peak(step, device), "weights_bytes": weights}


def peak(work: Callable[[], Any], device: str) -> int:
    """Bytes that ``work`` takes at most above what is taken before."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    process, done, seen = psutil.Process(), threading.Event(), [0]

    def look() -> None:
        while not done.wait(LOOK_SECONDS):
            seen.append(process.memory_info().rss - before)

    before = process.memory_info().rss
    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        done.set()
        looking.join()
    return max(seen)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="golinear bench memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose shape")
    parser.add_argument("--recipe", default="gdn 56+8")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    found = step_memory(
        resolve(options.model).shape, Recipe.parse(options.recipe), options.sequence_length, options.device
    )
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
