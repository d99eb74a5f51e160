"""Checkpoints of a training run: whole or not there, and refused by another run. safetensors and JSON only.

A checkpoint is a folder ``checkpoints/step-00001234`` with ``state.safetensors`` (new parameters, Adam's moments, random
states) and ``state.json`` (step, tokens seen, seconds, loss, the run's identity, the digest of the other file). It is
written under another name, synced to disk and renamed; the schedule and the data's position are functions of the step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

logger = logging.getLogger(__name__)

KEPT = 2
TENSORS, STATE = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk; its digest was right when it was found."""

    path: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.state["step"]

    def tensors(self) -> dict[str, Tensor]:
        return load_file(str(self.path / TENSORS))


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint of ``step`` under ``folder/checkpoints`` and drop all but the last two. Returns its path."""
    parent = folder / "checkpoints"
    parent.mkdir(parents=True, exist_ok=True)
    path, partial = parent / f"step-{step:08d}", parent / f".partial-{step:08d}"
    for left in parent.glob(".partial-*"):  # by a process that was killed: a folder has one writer at a time
        shutil.rmtree(left)
    partial.mkdir()
    try:
        _write(partial, tensors, {**state, "step": step})
    except BaseException:  # a full disk: give back what there was left of it
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():  # an earlier one of this step, complete or not, holds nothing that this one lacks
        shutil.rmtree(path)
    os.rename(partial, path)
    _sync(parent)
    for old in sorted(parent.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def _write(partial: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    content = {name: t.detach().cpu().contiguous() for name, t in (tensors | _random_states()).items()}  # type: ignore[operator]
    save_file(content, str(partial / TENSORS))
    written = {**state, "digest": _digest(partial / TENSORS)}
    (partial / STATE).write_text(json.dumps(written, indent=1, sort_keys=True))
    for name in (TENSORS, STATE, "."):
        _sync(partial / name)


def complete(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints under ``folder/checkpoints``, oldest first. Incomplete and damaged ones are passed over."""
    found = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            state = json.loads((path / STATE).read_text())
            if state["digest"] != _digest(path / TENSORS):
                raise ValueError("its tensors do not have the digest noted")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("checkpoint %s is passed over: %s", path, error)
            continue
        found.append(Checkpoint(path, state))
    return found


def check_identity(found: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Raises ValueError, naming every field that drifted, when a checkpoint is of another run than ``identity``."""
    theirs, ours = _flat(found.state["identity"]), _flat(json.loads(json.dumps(identity)))
    drifted = [
        f"{name} is {theirs.get(name, 'default')!r} in the checkpoint, {ours.get(name, 'default')!r} now"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if drifted:
        raise ValueError(
            f"checkpoint {found.path} is of another run: {'; '.join(drifted)}; allowed: the same run, or another folder"
        )


def restore_random_states(tensors: Mapping[str, Tensor]) -> None:
    """Put torch's generators where they were when the checkpoint was written."""
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def _random_states() -> dict[str, Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    return states | ({"rng/cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {
        k: v for name, part in value.items() for k, v in _flat(part, f"{prefix}.{name}" if prefix else name).items()
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
