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
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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


@dataclasses.dataclass
class _Work:
    """An attempt at work: what it said last, and its mirror of the checkpoints when the blobs are at a URL."""

    claim: Claim
    folder: Path
    said: dict[str, Any]
    mirror: Mirror | None = None


class Worker:
    """Stages of cells on one device. Calls come one at a time; ``progress`` and ``stop`` also while a stage runs.

    Of a cell on several GPUs each has its own worker, which calls itself a rank: all run all stages, rank 0 alone writes.
    """

    def __init__(self, store: Store, placement: Placement, rank: int = 0, size: int = 1):
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger().setLevel(logging.INFO)
        self.store, self.placement, self.rank, self.size = store, placement, rank, size
        self.bench = stages.Bench(placement.device, placement.source)
        self._work: list[_Work] = []  # one; several of cells that train in one pass
        self._told: set[int] = set()  # attempts that were told to stop
        self._lock = threading.Lock()
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
        with self._stage("convert", (cell, claim)) as (work,):
            self._load(cell)
            return stages.convert(cell, work.folder, self.bench)

    def train(self, cell: Cell, claim: Claim, micro_batch: int | None) -> dict[str, Any] | None:
        """Train from the newest checkpoint of any attempt and publish. Returns the provenance; None when stopped.

        Raises ClaimLost when someone else took the cell over: nothing is published then.
        """
        with self._stage("train", (cell, claim)) as (work,):
            try:
                with self._checkpoints(work):
                    found = stages.train(
                        cell, work.folder, self.bench, self._placement(micro_batch),
                        on_progress=self._on_progress, should_stop=self._told_to_stop,
                    )  # fmt: skip
            except Interrupted:
                return None
            self._publish(cell, claim, found)
        return found

    def train_together(
        self, cells: Sequence[tuple[Cell, Claim]], micro_batch: int | None
    ) -> list[dict[str, Any] | StageFailed | None]:
        """``train`` of several cells in one pass, each published by itself; how a cell failed stands in its place."""
        with self._stage("train", *cells) as works:
            with self._checkpoints(*works):
                results = stages.train_together(
                    [cell for cell, _ in cells], [work.folder for work in works], self.bench, self._placement(micro_batch),
                    on_progress=self._on_progress, should_stop=self._told_to_stop,
                    leaves=lambda i: works[i].claim.attempt in self._told,
                )  # fmt: skip
            return [self._ended(cell, work, result) for (cell, _), work, result in zip(cells, works, results)]

    def _ended(self, cell: Cell, work: _Work, result: dict[str, Any] | Exception) -> dict[str, Any] | StageFailed | None:
        """A cell's result, published; None when it was stopped, StageFailed when it or its publication failed."""
        if isinstance(result, Interrupted):
            return None
        try:
            if isinstance(result, Exception):
                raise result
            self._publish(cell, work.claim, result)
        except Exception as error:
            log.exception("train %s failed", cell.label)
            return _failure(error, work.folder, traceback.format_exc())
        return result

    def _placement(self, micro_batch: int | None) -> Placement:
        return dataclasses.replace(self.placement, micro_batch=micro_batch)

    @contextmanager
    def _checkpoints(self, *works: _Work) -> Iterator[None]:
        """Around training: the newest of earlier attempts are there, and with blobs at a URL new ones go to it."""
        with ExitStack() as stack:
            if self.rank == 0:
                for work in works:
                    self._adopt(work.claim, work.folder)
                    work.mirror = stack.enter_context(mirrored(self.store.blobs, work.claim.blob))
            yield

    def _publish(self, cell: Cell, claim: Claim, found: dict[str, Any]) -> None:
        if self.rank == 0:
            self.store.publish(claim, cell, found)
            self.store.blobs.drop_checkpoints(claim.key)

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
        with self._stage("evaluate", (cell, claim)):
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
        self._work = []
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
    def progress(self) -> dict[int, dict[str, Any]]:
        """By attempt, what the running stage said last, ``rows``: the training curve since the last call, and now and then
        ``system``."""
        with self._lock:
            works = self._work
            found = {work.claim.attempt: work.said for work in works}
            for work in works:
                work.said = {**work.said, "rows": []}
        more: dict[str, Any] = {}
        if works and time.monotonic() - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = time.monotonic()
            more = {"system": system_metrics.sample()}
        for work in works:
            said = found[work.claim.attempt]
            if said["stage"] == "train" and said["rows"]:
                kept = work.mirror.tokens if work.mirror else saved_tokens(work.folder)
                said = {**said, "checkpoint_tokens": kept}
            found[work.claim.attempt] = {**said, **more}
        return found

    @ray.method(concurrency_group="control")
    def stop(self, *attempts: int) -> None:
        """Ask these attempts' stage to save what it has and return; the attempts after them are not touched."""
        self._told |= set(attempts)

    def _told_to_stop(self) -> bool:
        """Whether all that are at work are told to."""
        return self._told.issuperset(work.claim.attempt for work in self._work)

    def _any_told_to_stop(self) -> bool:
        """The same of all ranks together: none goes on to a task that another leaves out."""
        if self.size == 1:
            return self._told_to_stop()
        from linear_core import ranks

        return ranks.current().any(self._told_to_stop())

    @contextmanager
    def _stage(self, name: str, *cells: tuple[Cell, Claim]) -> Iterator[list[_Work]]:
        """What a stage logs, and the exception it ends with, are kept in the attempts' logs. Raises StageFailed."""
        before = {work.claim.attempt for work in self._work}
        works = [_Work(claim, self.store.folder(claim), {"stage": name, "rows": []}) for _, claim in cells]
        if not before.issuperset(work.claim.attempt for work in works):
            self._sampled_at = -SAMPLE_SECONDS
        with self._lock:
            self._work = works
        labels = ", ".join(cell.label for cell, _ in cells)
        with ExitStack() as stack:
            for work in works:
                stack.enter_context(stages.log_tail(work.folder, f"log-rank{self.rank}.txt" if self.rank else "log.txt"))
            log.info("%s %s in process %d", name, labels, os.getpid())
            try:
                yield works
            except Exception as error:
                log.exception("%s %s failed", name, labels)
                raise _failure(error, works[0].folder) from error

    def _on_progress(self, said: dict[str, Any]) -> None:
        if said["stage"] == "evaluate" and self._any_told_to_stop():
            raise _Stopped
        with self._lock:
            work = self._work[said.pop("cell", 0)]
            work.said = {**said, "rows": [*work.said["rows"], *([said] if "tokens_seen" in said else [])]}

    def _load(self, cell: Cell) -> None:
        if self.bench.holds(cell):
            return
        self.bench.base_model(cell.base, cell.backbone)
        if self.placement.device.startswith("cuda"):
            import torch

            if self.placement.num_gpus < 1:  # the others on this card have theirs
                torch.cuda.set_per_process_memory_fraction(self.placement.num_gpus)
            self._allocated = torch.cuda.memory_allocated()


def _failure(error: Exception, folder: Path, traceback: str = "") -> StageFailed:
    return StageFailed(cause_of(error), f"{type(error).__name__}: {error}", traceback, log_tail=read_tail(folder))


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
