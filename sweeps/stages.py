"""Convert, train and evaluate one cell: plain functions on a folder, for Ray, a notebook or a shell alike.

A ``Bench`` is what a worker keeps between cells: the base model, loaded once, linearized in place for one cell after
another and restored in between. Files of a folder: cell.json, recipe.json, provenance.json, new_parameters.safetensors,
curve.jsonl, checkpoints/, scores/<task>.json.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.recipe import Recipe
from sweeps import preflight
from sweeps.cell import Cell, Placement, slug
from sweeps.cost import must_shard
from sweeps.provenance import provenance

log = logging.getLogger(__name__)
PARAMETERS = "new_parameters.safetensors"
Progress = Callable[[dict[str, Any]], None]  # {"stage", "done", "total", "unit", …}


class Bench:
    """A worker's base model and tokenizer on a device, and which cell it is linearized for at the moment.

    Not for threads. ``device``: cpu, cuda, cuda:0. ``source``: the training text, whose held-out part also decides which
    layers are the hardest. Loading raises as ``linear_core.models.load`` does.
    """

    def __init__(self, device: str = "cpu", source: str = "auto"):
        self.device, self.source = device, source
        self.base, self.backbone = "", "full"
        self.model: Any = None
        self.tokenizer: Any = None
        self.train_key = ""  # of the cell whose new parameters the model carries; "" when it is the base model

    def base_model(self, name: str, backbone: str = "") -> Any:
        """The unconverted model, loaded when it is another than before, restored in place when it is linearized.

        backbone: as in TrainSettings; the one that is there, else ``full``, unless given.
        """
        from linear_core.models import load_tokenizer
        from linear_core.ranks import load

        backbone = backbone or (self.backbone if self.base == name else "full")
        if (self.base, self.backbone) != (name, backbone):
            self.model = self.tokenizer = None
            self.base = ""
            gc.collect()  # a model in memory at a time
            sharded = backbone == "full" and self._must_shard(name)
            self.model = load(name, device=self.device, sharded=sharded, backbone=backbone)
            self.tokenizer = load_tokenizer(name)
            self.base, self.backbone = name, backbone
        elif self.train_key:
            from linear_core.convert import unconvert

            unconvert(self.model)
        self.train_key = ""
        return self.model

    def holds(self, cell: Cell) -> bool:
        """Whether the cell's base model is loaded, with its backbone."""
        return (self.base, self.backbone) == (cell.base, cell.backbone)

    def _must_shard(self, name: str) -> bool:
        """Whether the ranks that work together must spread the weights: they leave too little of a card's memory."""
        from linear_core.models import resolve
        from linear_core.ranks import current

        if current().size == 1 or not self.device.startswith("cuda"):
            return False
        import torch

        return must_shard(resolve(name).shape, torch.cuda.get_device_properties(self.device).total_memory)

    def text(self, cell: Cell) -> Any:
        """The training text in the base model's tokens (``linear_core.data.TokenData``)."""
        from linear_core.data import open_tokens

        if not self.holds(cell):
            self.base_model(cell.base, cell.backbone)
        return open_tokens(self.source, self.tokenizer, base=cell.base, device=self.device)

    def fresh(self, cell: Cell, folder: Path | None = None) -> Any:
        """The model linearized for a cell, new parameters at their start values (drawn from the cell's seed)."""
        from linear_core.convert import convert

        model = self.base_model(cell.base, cell.backbone)
        if not cell.is_base:
            recipe = self.resolved(cell, folder)
            self.train_key = "started " + cell.train_key
            convert(model, recipe, seed=cell.seed)
        return model

    def together(self, cells: Sequence[Cell], folders: Sequence[Path]) -> list[Any]:
        """As ``fresh`` for several cells of one base model at once: twins over the same weights, the first in place."""
        from linear_core.convert import convert
        from linear_core.layerwise import twins

        base = self.base_model(cells[0].base, cells[0].backbone)
        recipes = [self.resolved(cell, folder) for cell, folder in zip(cells, folders)]
        models = [base, *twins(base, len(cells) - 1)]
        self.train_key = "started " + cells[0].train_key
        for model, recipe, cell in zip(models, recipes, cells):
            convert(model, recipe, seed=cell.seed)
        return models

    def resolved(self, cell: Cell, folder: Path | None = None) -> Recipe:
        """The cell's recipe with ``hardest:SHARE`` as a list of layers: the folder's, else measured on held-out text."""
        if not cell.recipe.softmax_layers.startswith("hardest"):
            return cell.recipe
        from linear_core.diagnostics import resolve_hardest
        from linear_core.ranks import current

        known = folder / "recipe.json" if folder is not None else None
        if text := current().on_first(lambda: known.read_text() if known and known.exists() else ""):
            return Recipe(**json.loads(text))
        return current().gather(lambda: resolve_hardest(cell.recipe, self.model, lambda: self.text(cell)))[0]

    def trained(self, cell: Cell, folder: Path) -> Any:
        """The model with a cell's trained parameters: as the training left it, else read from the cell's folder."""
        from linear_core.convert import load_new_parameters

        if cell.is_base:
            return self.base_model(cell.base, cell.backbone)
        if self.train_key != cell.train_key:
            load_new_parameters(self.fresh(cell, folder), folder / PARAMETERS)
            self.train_key = cell.train_key
        self.model.eval()
        return self.model


def convert(cell: Cell, folder: Path, bench: Bench) -> dict[str, Any]:
    """Linearize the base model for a cell; writes cell.json and recipe.json.

    Returns {"new_parameters": number, "seconds": …}. Raises ValueError as ``linear_core.convert.convert`` does.
    """
    started = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    _record(folder / "cell.json", {"train_key": cell.train_key, "inputs": cell.inputs, "cell": cell.to_dict()})
    model = bench.fresh(cell, folder)
    _record(folder / "recipe.json", (cell.recipe if cell.is_base else model.recipe).to_dict())
    return {"new_parameters": _count_new(cell, model), "seconds": time.perf_counter() - started}


def _count_new(cell: Cell, model: Any) -> int:
    from linear_core.convert import new_parameters

    return 0 if cell.is_base else sum(p.numel() for p in new_parameters(model).values())


def train(
    cell: Cell,
    folder: Path,
    bench: Bench,
    placement: Placement | None = None,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Train a cell's new parameters, from the newest checkpoint in the folder if there is one.

    Writes new_parameters.safetensors, curve.jsonl and provenance.json; returns the provenance (commit, versions,
    hardware, seconds, tokens per second, …). Raises ValueError for the base model, and as ``linear_core.train.train``.
    """
    (found,) = train_together([cell], [folder], bench, placement, on_progress=on_progress, should_stop=should_stop)
    if isinstance(found, Exception):
        raise found
    return found


def train_together(
    cells: Sequence[Cell],
    folders: Sequence[Path],
    bench: Bench,
    placement: Placement | None = None,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    leaves: Callable[[int], bool] | None = None,
) -> list[dict[str, Any] | Exception]:
    """As ``train`` for cells with the same ``batches``, in one pass over these (``linear_core.train.train_cells``).

    A cell whose loss is not finite, or that was told to stop, has its exception in its place. Of ``train_seconds`` each
    has those of the pass. Raises ValueError for cells that have other batches.
    """
    from linear_core.train import train_cells

    first = cells[0]
    if first.train is None:
        raise ValueError(f"{first.label} is the base model: there is nothing to train")
    if other := [cell.label for cell in cells if cell.batches != first.batches]:
        raise ValueError(f"{', '.join(other)} cannot train with {first.label}: base, text, settings or seed differ")
    placement = placement or Placement(device=bench.device)
    started = time.perf_counter()
    if len(cells) > 1:
        models = bench.together(cells, folders)
    else:
        models = [bench.model if bench.train_key == "started " + first.train_key else bench.fresh(first, folders[0])]
    text = bench.text(first)
    bench.train_key = "in training"  # no longer at the start values
    results = train_cells(
        models, first.train, text, folders=folders, seed=first.seed, on_progress=on_progress,
        should_stop=should_stop, leaves=leaves, micro_batch=placement.micro_batch,
        checkpoint_minutes=placement.checkpoint_minutes,
    )  # fmt: skip
    found: list[dict[str, Any] | Exception] = []
    for cell, folder, model, result in zip(cells, folders, models, results):
        if isinstance(result, Exception):
            found.append(result)
            continue
        came_of = provenance(bench.device) | {
            "new_parameters": _count_new(cell, model),
            "train_seconds": time.perf_counter() - started,
            "placement": dataclasses.asdict(placement),
            "training": dataclasses.asdict(result),
        }
        _record(folder / "provenance.json", came_of)
        found.append(came_of)
    if not isinstance(found[0], Exception):
        bench.train_key = first.train_key
    return found


def evaluate(
    cell: Cell,
    folder: Path,
    bench: Bench,
    tasks: Iterable[TaskSpec],
    *,
    on_score: Callable[[TaskSpec, list[Score]], None] | None = None,
    on_progress: Progress | None = None,
) -> tuple[list[Score], dict[str, BaseException]]:
    """Measure a trained cell (or the base model) task by task; each task's scores are written and handed on at once.

    Returns all scores and, by task label, the exception of every task that failed: one costs only itself.
    Out-of-memory and lost claims are raised at once, since the tasks after them would fail alike; so is what fails on
    one of several ranks alone, since the others wait for it.
    """
    from linear_core.evaluate.run import evaluate_task

    model = bench.trained(cell, folder)
    todo = list(tasks)
    scores: list[Score] = []
    failed: dict[str, BaseException] = {}
    for number, task in enumerate(todo):
        if on_progress:
            on_progress({"stage": "evaluate", "task": task.label, "done": number, "total": len(todo), "unit": "tasks"})
        try:
            measured = evaluate_task(model, bench.tokenizer, task, device=bench.device)
            found = [preflight.flagged(cell, score) for score in measured]
        except Exception as error:
            if _is_fatal(error):
                raise  # to the flow, which ends all ranks
            log.exception("%s on %s failed", task.label, cell.label)
            failed[task.label] = error
            continue
        _record(folder / "scores" / f"{slug(task.label)}.json", [score.to_dict() for score in found])
        scores += found
        if on_score:
            on_score(task, found)
    return scores, failed


def _is_fatal(error: BaseException) -> bool:
    from linear_core.ranks import current, is_shared
    from sweeps.retries import cause_of

    alone = current().size > 1 and not is_shared(error)
    return alone or cause_of(error) == "oom" or "CUDA error" in str(error)


def _record(path: Path, content: Any) -> None:
    """``write_json``, of several ranks by the first."""
    from linear_core.ranks import current

    if current().leads:
        write_json(path, content)


def adopt_checkpoints(earlier: Iterable[Path], folder: Path) -> bool:
    """Copy the newest checkpoint of a cell's earlier attempts, and its curve, so that training goes on from there.

    The earlier folders are left alone: their processes may not be dead yet. True when something was found.
    """
    steps = [step for attempt in earlier if attempt != folder for step in (attempt / "checkpoints").glob("step-*")]
    for step in sorted(steps, key=lambda path: path.name, reverse=True):
        try:
            shutil.copytree(step, folder / "checkpoints" / step.name, dirs_exist_ok=True)
            if (step.parent.parent / "curve.jsonl").exists():
                shutil.copy2(step.parent.parent / "curve.jsonl", folder)
            return True
        except (OSError, shutil.Error) as error:  # dropped by its writer meanwhile
            log.info("checkpoint %s could not be copied: %s", step, error)
            shutil.rmtree(folder / "checkpoints" / step.name, ignore_errors=True)
    return False


def write_json(path: Path, content: Any) -> None:
    """Atomic: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, default=str, ensure_ascii=False))
    partial.replace(path)


@contextmanager
def log_tail(folder: Path, name: str = "log.txt", *, level: int = logging.INFO) -> Iterator[Path]:
    """Keep what is logged meanwhile in ``folder/log.txt``, for ``golinear logs``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(level)
    logging.getLogger().addHandler(handler)
    try:
        yield path
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
