"""What a plan costs: thousands of cells, half of them done, in a process of its own, start-up included.

    golinear bench plan                       10,000 cells
    golinear bench plan --cells 1000 --output plan.json

In a home of its own, which is removed; the base model is a folder that nobody reads weights from. Fails when it takes more than
3 s, more than one query, or torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from sweeps import schema
from sweeps.grids import ablation
from sweeps.plan import make_plan
from sweeps.store import Store
from sweeps.sweep import Sweep, TaskSource

SECONDS = 3.0
SHAPE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
         "vocab_size": 100}  # fmt: skip


def sweep_of(cells: int, model: Path) -> Sweep:
    """Half as many seeds of gdn and of gla 56+8, and the base model, pinned to weights and a text that nobody reads."""
    made = ablation(str(model), "gdn,gla", seeds=range(1, cells // 2 + 1), tasks="mmlu,lambada_openai")
    pinned = (dataclasses.replace(cell, revision="none", data="" if cell.is_base else "none") for cell in made.cells)
    sources = tuple(TaskSource(source="none", harness="none") for _ in made.tasks)
    return dataclasses.replace(made, cells=tuple(pinned), task_sources=sources)


def prepare(store: Store, cells: int, model: Path) -> None:
    """A folder that looks like a model, and results and scores of every gdn cell."""
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPE))
    (model / "model.safetensors").write_bytes(b"")
    sweep = sweep_of(cells, model)
    done = [cell for cell in sweep.cells if cell.recipe.mechanism == "gdn"]
    result = {"attempt": 1, "inputs": {}, "blob": "none", "published_at": 0.0, "provenance": {}}
    score = {"metric": "acc", "value": 0.5, "score": {}, "stored_at": 0.0}
    scores = [(cell.train_key, score_key) for cell in done for _, score_key in sweep.score_keys(cell)]
    with store.engine.begin() as connection:
        connection.execute(sa.insert(schema.results), [{"key": cell.train_key, **result} for cell in done])
        connection.execute(sa.insert(schema.scores), [{"key": key, "score_key": name, **score} for key, name in scores])


def plan(cells: int, model: Path, store: Store) -> dict[str, Any]:
    """Plan once; what came of it, and how many queries it took."""
    queries: list[str] = []
    sa.event.listen(store.engine, "before_cursor_execute", lambda *found: queries.append(found[2]))
    made = make_plan(sweep_of(cells, model), store)
    made.to_json()
    return {
        "cells": len(made.items), "skip": made.counts["skip"], "run": made.counts["run"],
        "queries": sum("SELECT" in query for query in queries), "torch": "torch" in sys.modules,
    }  # fmt: skip


def measure(cells: int, home: Path) -> dict[str, Any]:
    """``plan`` of a new process in this home, with its wall time in seconds."""
    store, model = Store(f"sqlite:///{home / 'golinear.db'}"), home / "model"
    prepare(store, cells, model)
    store.close()
    code = f"from sweeps.plan_bench import *; print(json.dumps(plan({cells}, Path({str(model)!r}), Store({store.url!r}))))"
    started = time.perf_counter()
    said = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    return {**json.loads(said), "seconds": time.perf_counter() - started}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show; 1 when it took too long or too much."""
    from linear_core.bench.report import show

    parser = argparse.ArgumentParser(prog="golinear bench plan", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--output", help="write the numbers as JSON")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="golinear-plan-") as home:
        row = measure(options.cells, Path(home))
    show("plan", [row], device="cpu", output=options.output)
    return int(row["seconds"] > SECONDS or row["queries"] > 1 or row["torch"])
