"""Choose the kernels' configurations on a new card, with all its processor cores, and write them to ``configs/``.

    python -m linear_core.kernels.tune --model smollm2-135m,llama3.1-8b --recipe "gdn 56+8,gla 56+8,hedgehog 56+8"

Autotuning compiles every configuration of a kernel, one after another, and then times them. Here as many processes as
there are cores first compile a part each into one Triton cache; a last one, alone on the card, finds all compiled and
only times. What it chose is collected as ``linear_core.kernels.tuned`` describes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from linear_core.kernels.tuned import collect

ROWS, LENGTH = 8, 1024  # of a training batch


def tune(models: str, recipes: str, cache: Path, processes: int) -> list[Path]:
    """Tune the kernels of recipes at the sizes of models, both comma-separated. Returns the files written."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "FLA_CACHE_MODE": "disabled", "FLA_CACHE_RESULTS": "1"}

    def start(part: int, parts: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "linear_core.kernels.tune", "--model", models, "--recipe", recipes]
        return subprocess.Popen([*command, "--part", f"{part}/{parts}"], env=environment)

    compiling = [start(part, processes) for part in range(processes)] if processes > 1 else []
    failed = sum(process.wait() != 0 for process in compiling)
    if failed:
        sys.stderr.write(f"{failed} of {processes} processes ended early: what they lack is compiled now\n")
    for chosen in cache.rglob("*.autotune.json"):
        chosen.unlink()  # by a part of the configurations, timed beside other processes
    if start(0, 1).wait():
        raise SystemExit("tuning failed: see above")
    return collect(cache, torch.cuda.get_device_name())


def use_kernels(model: str, recipe: str) -> None:
    """A training step, and a prompt in two pieces (the second starts from a state), by two layers of a model's shape."""
    from linear_core.bench.train import random_batch
    from linear_core.convert import convert, new_parameters
    from linear_core.models import build, resolve
    from linear_core.objectives import make_objective
    from linear_core.optim import NewParameterOptimizer
    from linear_core.recipe import Recipe
    from linear_core.settings import TrainSettings
    from linear_core.step import Trainee, train_step

    shape = dataclasses.replace(resolve(model).shape, layers=2, vocab=512, intermediate=256)
    linearized = convert(build(shape, device="cuda", dtype=torch.bfloat16), Recipe.parse(recipe))
    trainee = Trainee(linearized, NewParameterOptimizer(new_parameters(linearized), TrainSettings(tokens=10**6), 1e-3))
    trainee.optimizer.set_rate(0)
    batch = random_batch(shape, ROWS, LENGTH, "cuda")
    train_step([trainee], make_objective("ce"), batch, ROWS)
    with torch.no_grad():
        half = LENGTH // 2
        cache = linearized(batch.input_ids[:, :half], use_cache=True).past_key_values
        linearized(batch.input_ids[:, half:], use_cache=True, past_key_values=cache)
    torch.cuda.synchronize()


def take_part(part: int, parts: int) -> None:
    """Autotuning in this process knows only every ``parts``-th configuration of a kernel, from ``part`` on."""
    from triton.runtime.autotuner import Autotuner

    all_configs = Autotuner.prune_configs

    def some(self: Any, *arguments: Any) -> Any:
        configs = all_configs(self, *arguments)
        return configs[part::parts] or configs[:1]

    setattr(Autotuner, "prune_configs", some)  # noqa: B010 - a type checker minds the assignment


def main(argv: Sequence[str] | None = None) -> int:
    """Tune, or do a part of it."""
    parser = argparse.ArgumentParser(
        prog="python -m linear_core.kernels.tune", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--model", default="smollm2-135m,llama3.1-8b", help="whose sizes, comma-separated")
    parser.add_argument("--recipe", default="gdn 56+8,gla 56+8,hedgehog 56+8", help="comma-separated")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="that compile")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA device")
    if options.part:
        take_part(*map(int, options.part.split("/")))
        for model in options.model.split(","):
            for recipe in options.recipe.split(","):
                use_kernels(model, recipe)
        return 0
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or tempfile.mkdtemp())
    written = tune(options.model, options.recipe, cache, options.processes)
    sys.stdout.write("\n".join(map(str, written)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
