"""Training the new parameters of one cell, or of several cells of one base model at once (recipe section 5).

A run is a folder: ``curve.jsonl`` (a row a step), ``checkpoints/`` and, at the end, ``new_parameters.safetensors``. Called
again on the same folder, a run goes on from its last checkpoint with the same batches, bit for bit on a CPU. The curve
does not depend on interruptions, nor, but for rounding, on the micro-batch.

In the ranks of a group (linear_core.ranks) every rank calls the same and gets the same result; rank 0 writes the folder and
tells of progress, and ``batch_size`` is that of all ranks together. A run may go on with another number of ranks.

Precision is that of the models: frozen weights as loaded (bfloat16 on CUDA), new parameters, moments and losses float32.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from linear_core.convert import new_parameters, save_new_parameters
from linear_core.data import TokenData
from linear_core.loop import PARAMETERS, TRAINER_VERSION, Progress, Run
from linear_core.outcome import Interrupted, NonFiniteError, TrainResult
from linear_core.ranks import Ranks, check_batch, current, is_sharded, load, started_by_torchrun
from linear_core.settings import TrainSettings

__all__ = ["TRAINER_VERSION", "Interrupted", "NonFiniteError", "TrainResult", "train", "train_cells", "train_command"]


def train(
    model: Any,
    settings: TrainSettings,
    data: TokenData,
    *,
    folder: str | Path,
    seed: int,
    micro_batch: int | None = None,
    checkpoint_activations: float = 0.0,
    checkpoint_minutes: float = 5.0,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Train a linearized model's new parameters in place, going on from the last complete checkpoint in ``folder``.

    micro_batch: rows in one forward, a rank's share of the batch unless given; halved when memory runs out.
    checkpoint_activations: share of the layers whose activations are recomputed in the backward pass, from the start; more
    when a single row does not fit. on_progress: gets each row of the curve with ``stage``, ``done``, ``total`` and
    ``unit``. should_stop: asked before every micro-batch.
    Raises ValueError when the folder's checkpoint is of another run (naming what drifted) or the data too short,
    NonFiniteError, Interrupted, and torch.OutOfMemoryError when not even one row with activation checkpointing fits.
    """
    (result,) = train_cells(
        [model], settings, data, folders=[folder], seed=seed, micro_batch=micro_batch, should_stop=should_stop,
        checkpoint_activations=checkpoint_activations, checkpoint_minutes=checkpoint_minutes, on_progress=on_progress,
    )  # fmt: skip
    if isinstance(result, Exception):
        raise result
    return result


def train_cells(
    models: Sequence[Any],
    settings: TrainSettings,
    data: TokenData,
    *,
    folders: Sequence[str | Path],
    seed: int,
    micro_batch: int | None = None,
    checkpoint_activations: float = 0.0,
    checkpoint_minutes: float = 5.0,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
    leaves: Callable[[int], bool] | None = None,
) -> list[TrainResult | NonFiniteError | Interrupted]:
    """Train several cells of one base model on the same batches, each with its own clip norm, optimiser and folder.

    models: twins over the same frozen weights (linear_core.layerwise.twins), each converted by its own recipe; under
    ``layerwise`` one forward of the base serves them all. A cell gets what it would get alone: one whose checkpoint is
    further on waits until the others have come so far. One whose loss is not finite, or that is told to stop, drops out
    and its error stands in its place. leaves: asked before every step whether this cell (its index) is told to;
    should_stop: whether all are. Rows of on_progress have a ``cell``. The rest is as in ``train``.
    """
    ranks = current()
    check_share(settings, ranks, sharded=is_sharded(models[0]))
    share = settings.batch_size // ranks.size
    chosen = [i for i, model in enumerate(models) if new_parameters(model)]
    results: list[TrainResult | NonFiniteError | Interrupted] = [
        _nothing_to_train(m, Path(f), ranks) for m, f in zip(models, folders)
    ]
    if not chosen:
        return results
    tell = on_progress or (lambda _row: None)
    on_gpu = models[0].device.type == "cuda"
    with _told_to_stop() as told, torch.random.fork_rng(devices=[models[0].device] if on_gpu else []):
        torch.manual_seed(seed)
        run = Run(
            [models[i] for i in chosen], settings, data, [Path(folders[i]) for i in chosen], seed,
            micro_batch=min(micro_batch or share, share), recomputed=checkpoint_activations,
            checkpoint_seconds=60 * checkpoint_minutes, on_progress=lambda row: tell({**row, "cell": chosen[row["cell"]]}),
            should_stop=lambda: told.is_set() or (should_stop is not None and should_stop()),
            leaves=leaves and (lambda i: leaves(chosen[i])),
        )  # fmt: skip
        try:
            for i, result in zip(chosen, run.run()):
                results[i] = result
        finally:
            run.memory.checkpoint_activations(0)
    return results


def check_share(settings: TrainSettings, ranks: Ranks, sharded: bool = False) -> None:
    """Raises ValueError when the ranks cannot share the batches: unevenly, or with sharded weights the last one."""
    check_batch(settings.batch_size, ranks.size)
    sequences = math.ceil(settings.tokens / settings.sequence_length)
    if sharded and ranks.size == 1:
        raise ValueError("sharded weights need several ranks: torchrun --nproc-per-node 2 …, or gpus=2 in a sweep")
    if sharded and sequences % ranks.size:
        raise ValueError(
            f"{settings.tokens} tokens are {sequences} sequences, which {ranks.size} ranks with sharded weights cannot "
            f"share; allowed: a multiple of {ranks.size} × {settings.sequence_length} tokens"
        )


def _nothing_to_train(model: Any, folder: Path, ranks: Ranks) -> TrainResult:
    """For a cell without new parameters (mechanism none): its file of parameters is empty, its run has no step."""
    if not new_parameters(model) and ranks.leads:
        folder.mkdir(parents=True, exist_ok=True)
        save_new_parameters(model, folder / PARAMETERS)
    return TrainResult(
        steps=0, tokens_seen=0, loss=None, seconds=0.0, tokens_per_second=0.0, seconds_to_first_step=0.0,
        micro_batch=0, accumulation=0, activation_checkpointing=0.0, peak_memory=0,
    )  # fmt: skip


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM sets meanwhile. Outside the main thread, where no handler can be set, nothing does."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda _number, _frame: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def train_command(
    model: str,
    recipe: str,
    folder: str | Path,
    *,
    settings: TrainSettings,
    data: str = "auto",
    seed: int = 1,
    device: str = "",
    micro_batch: int | None = None,
    checkpoint_activations: float = 0.0,
    shard_weights: bool = False,
    checkpoint_minutes: float = 5.0,
    on_progress: Progress | None = None,
) -> TrainResult:
    """``golinear train``: load, linearize and train one cell outside any flow, into ``folder``.

    model: as linear_core.models.resolve takes it. recipe: e.g. ``gdn 56+8 conv``. data: a source of linear_core.sources.
    device: cuda when there is one, else cpu, unless given. Under torchrun the ranks train together, with ``shard_weights``
    over a base model that is spread over them. Raises ValueError as the parts do, before anything is loaded.
    """
    from linear_core import convert, models
    from linear_core.data import data_fingerprint, open_tokens
    from linear_core.recipe import Recipe

    parsed, base = Recipe.parse(recipe), models.resolve(model)
    if parsed.mechanism == "softmax":
        raise ValueError("recipe 'softmax' is the base model: there is nothing to train")
    data_fingerprint(data)
    models.check_backbone(settings.backbone)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with started_by_torchrun(device) as (ranks, device):
        check_share(settings, ranks, sharded=shard_weights)
        tokens = open_tokens(data, models.load_tokenizer(base), base=base, device=device)
        loaded = load(base, device=device, sharded=shard_weights, backbone=settings.backbone)
        if parsed.softmax_layers.startswith("hardest"):
            from linear_core.diagnostics import resolve_hardest

            parsed = ranks.gather(lambda: resolve_hardest(parsed, loaded, lambda: tokens))[0]
        linearized = convert.convert(loaded, parsed, seed=seed)
        return train(
            linearized, settings, tokens, folder=folder, seed=seed, micro_batch=micro_batch,
            checkpoint_activations=checkpoint_activations, checkpoint_minutes=checkpoint_minutes, on_progress=on_progress,
        )  # fmt: skip
