"""A slot runs cells one after another on one group of Ray actors, and replaces it when it died or must not be used again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from flows.cluster import any_node_alive, node_alive
from sweeps.cell import Placement
from sweeps.retries import cause_of
from sweeps.store import ClaimLost, Store

POLL_SECONDS = 1.0
QUICK_START_SECONDS = 4.0  # a worker that starts within them found a place at once
START_SECONDS = 600.0  # for a worker to find a place: a cluster may have to start a machine first
STOP_SECONDS = 20.0  # for a stage that was asked to stop, until its process is ended


class RayGone(RuntimeError):
    """Nothing of this Ray is left that could run a cell: the flow ends, its cells stay to be resumed."""


class StageFailed(Exception):
    """A stage ended without a result: cause (sweeps.retries), reason in a line, traceback of the worker.

    ``counted``: whether it counts towards the bound of its cause. ``log_tail``: the end of the attempt's log.
    """

    def __init__(self, cause: str, reason: str, traceback: str = "", counted: bool = True, log_tail: str = ""):
        super().__init__(reason)
        self.cause, self.reason, self.traceback = cause, reason, traceback
        self.counted, self.log_tail = counted, log_tail

    def __reduce__(self) -> Any:
        return StageFailed, (self.cause, self.reason, self.traceback, self.counted, self.log_tail)


class Slot:
    """One worker process at a time (of a cell with several GPUs: one a GPU), for cells of one base model at a time. Used by one thread."""

    def __init__(
        self,
        store: Store,
        placement: Placement,
        on_waiting: Callable[[], None] = lambda: None,
        worker: type | None = None,
    ):
        self.store, self.placement, self.worker = store, placement, worker
        self.on_waiting = on_waiting  # called every second while a new worker finds no place
        self.base = ""
        self.node = ""
        self._group: Any = None

    def start(self, base: str, stop: Event) -> None:
        """An actor for this base model: the one that is there when it serves the same, else a fresh process.

        ``stop`` ends the wait for a place. Raises as ``_node``.
        """
        if self._group is not None and self.base == base:
            return
        from flows.group import Group

        self.close()
        self._group = Group(self.store, self.placement, self.worker)
        self.node = self._node(stop)
        self.base = base

    def _node(self, stop: Event) -> str:
        """The node that the new worker runs on, once it runs. Ray itself would wait for ever where it finds no place.

        Raises RayGone when no node of the cluster lives, StageFailed when the process ends, finds no place in time (which
        is not counted: the next try asks again) or is told to stop.
        """
        import ray

        references = self._group.joins()
        started = time.monotonic()
        try:
            while len(ray.wait(references, num_returns=len(references), timeout=POLL_SECONDS)[0]) < len(references):
                if not any_node_alive():
                    raise RayGone("Ray has no living node left: run the sweep again, it goes on from its checkpoints")
                waited = time.monotonic() - started
                if waited > START_SECONDS or stop.is_set():
                    self.close()
                    raise StageFailed("preempted", f"no node had room for a worker within {waited:.0f} s", counted=False)
                if waited > QUICK_START_SECONDS:
                    self.on_waiting()
            return ray.get(references)[0]
        except ray.exceptions.RayError as error:
            whose, error = self._group.failure(references, error)
            self.close()
            raise StageFailed(
                "crash", f"{whose}the worker process died at its start: {_first_line(error)}", str(error)
            ) from None

    def call(
        self,
        stage: str,
        *arguments: Any,
        stop: Event | None = None,
        attempts: Sequence[int] = (),
        on_progress: Callable[[dict[int, dict[str, Any]]], None] | None = None,
    ) -> Any:
        """Run a stage and wait, handing on its progress (by attempt) every second. ``stop``: ask ``attempts`` to save and
        return.

        Raises StageFailed with the cause: ``preempted`` (its node is gone), ``crash`` (its process died on a living
        node), or what its exception stands for; ClaimLost from ``on_progress``, after asking the stage to stop.
        """
        import ray

        references = self._group.call(stage, *arguments)
        asked_at = 0.0
        try:
            while True:
                done, left = ray.wait(references, num_returns=len(references), timeout=POLL_SECONDS)
                if on_progress:
                    on_progress(ray.get(self._group.actors[0].progress.remote()))
                results = ray.get(done)
                if not left:
                    return all(results) if stage == "settle" else results[0]
                if stop is not None and stop.is_set() and not asked_at:
                    asked_at = time.monotonic()
                    self.stop(*attempts)
                if asked_at and time.monotonic() - asked_at > STOP_SECONDS:
                    self.close()
                    raise StageFailed("preempted", f"{stage} was asked to stop and did not within {STOP_SECONDS:.0f} s")
        except ClaimLost:  # noticed while its progress was written down
            self.stop(*attempts)
            raise
        except ray.exceptions.RayError as error:
            raise self._failure(stage, *self._group.failure(references, error)) from None

    def stop(self, *attempts: int) -> None:
        """Ask these attempts at the running stage to save and return."""
        self._group.call("stop", *attempts)

    def _failure(self, stage: str, whose: str, error: Any) -> StageFailed:
        """What an error of the workers stands for; ends them when they cannot be used again. whose: names the rank."""
        import ray

        traceback = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours it
        if not isinstance(error, ray.exceptions.RayTaskError):
            # unavailable: the connection broke, as when a node goes; a process that died on a living node is said to be dead
            unreachable = isinstance(error, ray.exceptions.ActorUnavailableError)
            cause = "preempted" if unreachable or not node_alive(self.node) else "crash"
            self.close()
            return StageFailed(cause, f"{whose}the worker process died during {stage}: {_first_line(error)}", traceback)
        failed = error.cause if isinstance(error.cause, StageFailed) else StageFailed(cause_of(error.cause), str(error.cause))
        if failed.cause == "oom" or "CUDA error" in failed.reason or self._group.size > 1:
            self.close()
        return StageFailed(failed.cause, f"{whose}{failed.reason}", traceback, log_tail=failed.log_tail)

    def close(self) -> None:
        """End the process; its GPU memory goes with it."""
        if self._group is not None:
            self._group.close()
        self._group, self.base = None, ""


def _first_line(error: BaseException) -> str:
    told = (line.strip() for line in str(error).splitlines() if "exit detail" in line or "died" in line)
    return next(told, type(error).__name__)
