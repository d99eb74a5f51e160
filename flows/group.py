"""The Ray actors that run one cell: one, or a rank for each of its GPUs, side by side on one node.

Several lie in a placement group, which ``close`` removes, and join a torch.distributed group (linear_core.ranks). Every rank
runs every stage; rank 0 writes files and is asked for progress. When one fails, all are ended by whoever holds the group:
the others may be waiting for it.
"""

from __future__ import annotations

import re
from typing import Any

from sweeps.cell import Placement
from sweeps.store import Store

GRACE_SECONDS = 5.0  # after a first error, for the one behind it: a rank that dies lets the others fail of its silence
SILENCE = re.compile(r"gloo|nccl|connection (closed|reset)|torch\.distributed", re.IGNORECASE)


class Group:
    """Made at once; the actors come when there is room for all of them."""

    def __init__(self, store: Store, placement: Placement, worker: type | None = None):
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from flows.workers import Worker

        self.size = max(1, int(placement.num_gpus))
        cpus, gpus = max(1, placement.num_cpus // self.size), placement.num_gpus / self.size
        remote = ray.remote(
            max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}, num_cpus=cpus, num_gpus=gpus
        )(worker or Worker)  # type: ignore[call-overload]
        if self.size == 1:
            self._place = None
            self.actors = [remote.remote(store, placement)]
            return
        self._place = placement_group([{"CPU": cpus, "GPU": gpus}] * self.size, strategy="STRICT_PACK")
        self.actors = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._place, placement_group_bundle_index=rank)
            ).remote(store, placement, rank, self.size)
            for rank in range(self.size)
        ]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """References to what every rank returns."""
        return [getattr(actor, method).remote(*arguments) for actor in self.actors]

    def joins(self) -> list[Any]:
        """References that are there once the actors run and, if they are several, have found each other."""
        address = self.actors[0].address.remote()
        return self.call("join", address) if self.size > 1 else self.call("node")

    def failure(self, references: list[Any], error: Exception) -> tuple[str, Exception]:
        """``rank 1 of 2: `` and the error that tells most of why the group failed; of one actor "" and its own."""
        import ray

        if self.size == 1:
            return "", error
        ray.wait(references, num_returns=len(references), timeout=GRACE_SECONDS)
        found = []
        for rank, reference in enumerate(references):
            try:
                ray.get(reference, timeout=0)
            except ray.exceptions.GetTimeoutError:  # it waits for the others
                continue
            except ray.exceptions.RayError as own:
                died = not isinstance(own, ray.exceptions.RayTaskError)
                found.append((0 if died else 2 if SILENCE.search(str(own)) else 1, rank, own))
        if not found:
            return "", error
        _, rank, telling = min(found, key=lambda each: each[:2])
        return f"rank {rank} of {self.size}: ", telling

    def close(self) -> None:
        """End the processes and give their place back."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        if self._place is not None:
            ray.util.remove_placement_group(self._place)
