"""From what a user names — a model, a folder, a cell of the store — to a model that is loaded. Imports no torch by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from linear_core import models
from linear_core.recipe import Recipe
from sweeps.cell import Cell


@dataclass(frozen=True)
class Opened:
    """A model on its device with its tokenizer. ``base``: what it was made from; ``cell``: when it is one of the store."""

    model: Any
    tokenizer: Any
    base: models.BaseModel | None
    recipe: Recipe | None = None
    cell: Cell | None = None


def open_model(what: str, *, device: str = "cpu", backbone: str = "") -> Opened:
    """A registry name, hub id or folder of a base model; an exported folder; a cell's key (or the end of it) or folder.

    backbone: how frozen layers are kept (TrainSettings.backbone); unless given as in the cell's training, else ``full``.
    Raises ValueError when it is none of these, saying what is allowed.
    """
    from linear_core.export import is_linearized_folder, load_linearized

    folder = Path(what)
    if (folder / "cell.json").exists():
        return _open_cell(folder, device, backbone)
    if folder.is_dir() and is_linearized_folder(folder):
        model, tokenizer = load_linearized(folder, device=device)
        return Opened(model, tokenizer, None, model.recipe)
    if folder.is_dir() or what in models.REGISTRY or "/" in what:
        base = models.resolve(what)
        model = models.load(base, device=device, backbone=backbone or "full")
        return Opened(model, models.load_tokenizer(base), base)
    return _open_cell(_published(what), device, backbone)


def described(what: str) -> tuple[models.Shape, Recipe | None]:
    """Shape and recipe (None: a base model) of whatever ``open_model`` opens, without its weights; raises as it does."""
    from linear_core.export import POINTER_FILE, is_linearized_folder

    folder = Path(what)
    if not folder.is_dir() and what not in models.REGISTRY and "/" not in what:
        folder = _published(what)
    if (folder / "cell.json").exists():
        cell = Cell.from_dict(json.loads((folder / "cell.json").read_text())["cell"])
        kept = folder / "recipe.json"  # which layers the hardest are is known there
        recipe = Recipe(**json.loads(kept.read_text())) if kept.exists() else cell.recipe
        return models.resolve(cell.base).shape, None if cell.is_base else recipe
    if folder.is_dir() and is_linearized_folder(folder):
        if (folder / POINTER_FILE).exists():
            pointer = json.loads((folder / POINTER_FILE).read_text())
            known = pointer["base"] in models.REGISTRY
            return models.resolve(pointer["base" if known else "source"]).shape, Recipe(**pointer["recipe"])
        config = json.loads((folder / "config.json").read_text())
        return models.shape_from(config), Recipe(**config["golinear"])
    return models.resolve(what).shape, None


def _published(text: str) -> Path:
    from sweeps import queries
    from sweeps.store import Store

    store = Store()
    try:
        return store.published_folder(queries.find_key(store, text))
    except (ValueError, KeyError) as error:
        known = ", ".join(models.REGISTRY)
        raise ValueError(
            f"{text!r} is no model, folder or trained cell ({error.args[0]}); allowed: {known}, a hub id, a folder, a cell's key"
        ) from None


def _open_cell(folder: Path, device: str, backbone: str) -> Opened:
    from sweeps.stages import Bench

    cell = Cell.from_dict(json.loads((folder / "cell.json").read_text())["cell"])
    bench = Bench(device)
    wanted = replace(cell, train=replace(cell.train, backbone=backbone)) if backbone and cell.train else cell
    model = bench.trained(wanted, folder)
    return Opened(model, bench.tokenizer, models.resolve(cell.base), cell.recipe, cell)
