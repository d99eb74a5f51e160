"""Kernels that one process compiled are those of another with an empty cache: it compiles none. On a CUDA device.

``python -m tests.gpu.test_kernel_archive_gpu ARCHIVE`` is such a process: it unpacks the archive or, without one, packs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from linear_core import kernel_archive
from linear_core.bench.train import random_batch
from linear_core.convert import convert, new_parameters
from linear_core.models import REGISTRY, build
from linear_core.objectives import make_objective
from linear_core.optim import NewParameterOptimizer
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.speed import FastStep, compiled
from linear_core.step import Trainee

COMPILED = {".cubin", ".so"}  # kernels, and what launches them

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def test_a_second_process_with_an_empty_cache_compiles_nothing(tmp_path: Path) -> None:
    first, second = (used(tmp_path / "kernels.tar.gz", tmp_path / name) for name in ("first", "second"))
    sys.stderr.write(f"first use {first}\nwith its archive {second}\n")
    assert first["added"] == 0 and first["compiled"] > 10
    assert second["added"] == first["packed"] and second["compiled"] == 0
    assert second["seconds_to_first_step"] < first["seconds_to_first_step"]
    assert second["loss"] == pytest.approx(first["loss"], rel=1e-3)


def used(archive: Path, cache: Path) -> dict[str, Any]:
    """What a process with this cache says of its first step."""
    environment = {name: str(cache / kind) for kind, name in kernel_archive.FOLDERS.items()}
    command = [sys.executable, "-m", "tests.gpu.test_kernel_archive_gpu", str(archive)]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True, timeout=200
    )
    return json.loads(done.stdout.splitlines()[-1])


def first_step(archive: Path, device: str = "cuda") -> dict[str, Any]:
    """One training step of SmolLM2-135M's shapes, layers compiled, from a cache with the archive's kernels."""
    folder = kernel_archive.folders()["triton"]
    fetched = time.perf_counter()
    added = kernel_archive.unpack(archive) if archive.exists() else 0
    unpacking, before = time.perf_counter() - fetched, set(folder.rglob("*"))
    shape = REGISTRY["smollm2-135m"].shape
    model = convert(build(shape, device=device, dtype=torch.bfloat16), Recipe.parse("gdn 56+8"), seed=1)
    trainee = Trainee(model, NewParameterOptimizer(new_parameters(model), TrainSettings(tokens=10**6), 1e-3))
    started = time.perf_counter()
    with compiled([model]):
        numbers = FastStep()([trainee], make_objective("ce"), random_batch(shape, 2, 1024, device), 2)
        loss = numbers[0, 0].item()
    seconds = time.perf_counter() - started
    new = [path for path in folder.rglob("*") if path not in before and path.suffix in COMPILED]
    return {
        "seconds_to_first_step": seconds,
        "seconds_to_unpack": unpacking,
        "added": added,
        "compiled": len(new),
        "names": sorted(path.name for path in new)[:40] if added else [],
        "packed": 0 if added else kernel_archive.pack(archive),
        "bytes": archive.stat().st_size,
        "loss": loss,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(first_step(Path(sys.argv[1]))) + "\n")
