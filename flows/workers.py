"""The Ray actor of a slot: a process that keeps a base model and runs the stages of one cell after another.

A worker knows the store and the files, not Prefect and not MLflow: the flow asks it for progress and writes those.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ray

from flows.slots import StageFailed
from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.outcome import Interrupted
from sweeps import kernels, stages, system_metrics
from sweeps.blobs import CHECKPOINTS
from sweeps.cell import Cell, Placement
from sweeps.mirror import Mirror, mirrored, saved_tokens
from sweeps.retries import cause_of
from sweeps.store import Claim, Store

log = logging.getLogger(__name__)
SAMPLE_SECONDS = 10.0  # between samples of the machine
MEMORY_SLACK = 64 * 2**20  # bytes that may stay allocated after a cell; more means a fresh process


class _Stopped(Exception):
    """The evaluation was asked to stop between two tasks."""


class Worker:
    """Stages of cells on one device. Calls come one at a time; ``progress`` and ``stop`` also while a stage runs.

    Of a cell on several GPUs each has its own worker, which calls itself a rank: all run all stages, rank 0 alone writes.
    """

    def __init__(self, store: Store, placement: Placement, rank: int = 0, size: int = 1):
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger().setLevel(logging.INFO)
        self.store, self.placement, self.rank, self.size = store, placement, rank, size
        self.bench = stages.Bench(placement.device, placement.source)
        self._attempt, self._told = 0, -1  # the attempt at work, and the one that was told to stop
        self._lock = threading.Lock()
        self._progress: dict[str, Any] = {}
        self._folder = Path()
        self._mirror: Mirror | None = None  # of the checkpoints, when the blobs are at a URL
        self._sampled_at = -SAMPLE_SECONDS
        self._published = 0  # files of compiled kernels
        self._allocated: int | None = None  # bytes on the GPU after the base model was loaded

    def address(self) -> str:
        """Where this worker's node can be reached, with a port that is free."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"{host}:{free.getsockname()[1]}"

    def join(self, address: str) -> str:
        """Become a rank of the group whose rank 0 is at this address, for the rest of the process. Returns ``node()``."""
        from linear_core import ranks

        ranks.join(self.rank, self.size, address, self.placement.device)
        return self.node()

    def kernels(self) -> str:
        """The kind of kernels that are compiled here (linear_core.kernel_archive); "" on a CPU."""
        from linear_core import kernel_archive

        return kernel_archive.key() if self.placement.device.startswith("cuda") else ""

    def fetch_kernels(self, url: str) -> int:
        """See ``sweeps.kernels.fetch``."""
        return kernels.fetch(url) if self.rank == 0 else 0

    @ray.method(concurrency_group="control")
    def publish_kernels(self, url: str) -> int:
        """See ``sweeps.kernels.publish``; while a stage runs. Nothing is put when there is nothing new."""
        from linear_core import kernel_archive

        if self.rank or (number := len(kernel_archive.files())) == self._published:
            return 0
        self._published = number
        return kernels.publish(url)

    def convert(self, cell: Cell, claim: Claim) -> dict[str, Any]:
        """Linearize; see ``stages.convert``."""
        folder = self.store.folder(claim)
        with self._stage("convert", cell, claim):
            self._load(cell)
            return stages.convert(cell, folder, self.bench)

    def train(self, cell: Cell, claim: Claim, micro_batch: int | None) -> dict[str, Any] | None:
        """Train from the newest checkpoint of any attempt and publish. Returns the provenance; None when stopped.

        Raises ClaimLost when someone else took the cell over: nothing is published then.
        """
        folder = self.store.folder(claim)
        placement = dataclasses.replace(self.placement, micro_batch=micro_batch)
        with self._stage("train", cell, claim):
            if self.rank == 0:
                self._adopt(claim, folder)
            mirror = mirrored(self.store.blobs, claim.blob) if self.rank == 0 else nullcontext()
            try:
                with mirror as self._mirror:
                    found = stages.train(
                        cell, folder, self.bench, placement, on_progress=self._on_progress, should_stop=self._told_to_stop
                    )
            except Interrupted:
                return None
            if self.rank == 0:
                self.store.publish(claim, cell, found)
                self.store.blobs.drop_checkpoints(claim.key)
        return found

    def _adopt(self, claim: Claim, folder: Path) -> None:
        """The newest checkpoint of earlier attempts, on this node or, with remote blobs, on any."""
        stages.adopt_checkpoints(_earlier(folder), folder)
        here = max((step.name for step in (folder / CHECKPOINTS).glob("step-*")), default="")
        if self.store.blobs.fetch_checkpoint(claim.blob, newer_than=here):
            log.info("going on from a checkpoint of another node")

    def evaluate(
        self, cell: Cell, claim: Claim, tasks: Sequence[tuple[TaskSpec, str]], trained_here: bool
    ) -> tuple[list[Score], dict[str, str]] | None:
        """Measure; each task's scores are stored when it ends. Returns them, and why each task that failed did.

        None when it was stopped between two tasks.
        """
        keys = dict(tasks)
        folder = self.store.folder(claim)
        put = lambda task, found: self.store.put_scores(claim, keys[task], found)  # noqa: E731
        source = folder if trained_here or cell.is_base else self.store.published_folder(cell.train_key)
        with self._stage("evaluate", cell, claim):
            self._load(cell)
            try:
                scores, failed = stages.evaluate(
                    cell, source, self.bench, list(keys),
                    on_score=put if self.rank == 0 else None,
                    on_progress=self._on_progress,
                )  # fmt: skip
            except _Stopped:
                return None
        return scores, {label: f"{type(error).__name__}: {error}" for label, error in failed.items()}

    def settle(self) -> bool:
        """Back to the bare base model. False when GPU memory did not come back: the process should be replaced."""
        if self.bench.base:
            self.bench.base_model(self.bench.base)
        self._progress = {}
        gc.collect()
        if self._allocated is None:
            return True
        import torch

        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for every stream that a recorded step has used
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() <= self._allocated + MEMORY_SLACK

    def node(self) -> str:
        """Ray's id of the node that this process runs on."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        """What the running stage said last, ``rows``: the training curve since the last call, and now and then ``system``."""
        with self._lock:
            said, self._progress = self._progress, {**self._progress, "rows": []}
        if said.get("stage") == "train" and said["rows"]:
            kept = self._mirror.tokens if self._mirror else saved_tokens(self._folder)
            said = {**said, "checkpoint_tokens": kept}
        if said and time.monotonic() - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = time.monotonic()
            said = {**said, "system": system_metrics.sample()}
        return said

    @ray.method(concurrency_group="control")
    def stop(self, attempt: int) -> None:
        """Ask this attempt's stage to save what it has and return; the attempts after it are not touched."""
        self._told = attempt

    def _told_to_stop(self) -> bool:
        return self._told == self._attempt

    def _any_told_to_stop(self) -> bool:
        """The same of all ranks together: none goes on to a task that another leaves out."""
        if self.size == 1:
            return self._told_to_stop()
        from linear_core import ranks

        return ranks.current().any(self._told_to_stop())

    @contextmanager
    def _stage(self, name: str, cell: Cell, claim: Claim) -> Iterator[None]:
        """What a stage logs, and the exception it ends with, are kept in the attempt's log. Raises StageFailed."""
        self._progress = {"stage": name, "rows": []}
        if self._attempt != claim.attempt:
            self._sampled_at = -SAMPLE_SECONDS
        self._attempt, self._folder = claim.attempt, self.store.folder(claim)
        with stages.log_tail(self._folder, f"log-rank{self.rank}.txt" if self.rank else "log.txt"):
            log.info("%s %s in process %d", name, cell.label, os.getpid())
            try:
                yield
            except Exception as error:
                log.exception("%s %s failed", name, cell.label)
                reason = f"{type(error).__name__}: {error}"
                raise StageFailed(cause_of(error), reason, log_tail=read_tail(self._folder)) from error

    def _on_progress(self, said: dict[str, Any]) -> None:
        if said["stage"] == "evaluate" and self._any_told_to_stop():
            raise _Stopped
        with self._lock:
            rows = [*self._progress.get("rows", []), *([said] if "tokens_seen" in said else [])]
            self._progress = {**said, "rows": rows}

    def _load(self, cell: Cell) -> None:
        if self.bench.holds(cell):
            return
        self.bench.base_model(cell.base, cell.backbone)
        if self.placement.device.startswith("cuda"):
            import torch

            if self.placement.num_gpus < 1:  # the others on this card have theirs
                torch.cuda.set_per_process_memory_fraction(self.placement.num_gpus)
            self._allocated = torch.cuda.memory_allocated()


def _earlier(folder: Path) -> list[Path]:
    """Folders of the cell's other attempts, newest first."""
    others = [path for path in folder.parent.iterdir() if path.name.isdigit() and path != folder]
    return sorted(others, key=lambda path: int(path.name), reverse=True)


def read_tail(folder: Path, lines: int = 100) -> str:
    """End of an attempt's log; "" when it cannot be read from here."""
    try:
        return "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
