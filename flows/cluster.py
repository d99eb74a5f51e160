"""Ray for one flow: an own loopback instance, or the cluster that RAY_ADDRESS names, which is left running."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

OBJECT_STORE_BYTES = 100 * 2**20  # stages talk through files: Ray carries small values only


@dataclass(frozen=True)
class Capacity:
    """What each living node of a cluster can give: (whole GPUs, CPUs); and how many hosts they are."""

    nodes: tuple[tuple[int, int], ...]
    num_hosts: int

    @property
    def gpus(self) -> int:
        return sum(gpus for gpus, _ in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(cpus for _, cpus in self.nodes)

    def places(self, gpus: float) -> int:
        """Workers of so many GPUs that fit at a time; without GPUs one a node. A worker lies on one node."""
        return sum(int(have // gpus) if gpus else 1 for have, _ in self.nodes)

    def cpus_each(self, num_workers: int, gpus: float) -> int:
        """CPUs for each of so many workers, so that all of them find a place."""
        there = [(int(have // gpus) if gpus else num_workers, cpus) for have, cpus in self.nodes if have >= gpus]
        on_a_node = math.ceil(num_workers / len(there)) if there else 1
        return max(1, min((cpus // min(fit, on_a_node) for fit, cpus in there), default=1))


@contextmanager
def cluster(num_gpus: int | None = None) -> Iterator[Capacity]:
    """Connect (or start Ray on this machine), yield what there is, disconnect. A Ray that was there before stays.

    num_gpus: places for GPUs of a Ray that is started here; those that there are unless given.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield _capacity(ray)
        return
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        _keep_to_this_machine()
    own: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "num_gpus": num_gpus,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_system_config": {"worker_niceness": 0},  # 15 by default: a loaded machine would starve the training
    }
    with _signals_kept():
        ray.init(**({"address": address} if address else own), log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield _capacity(ray)
    finally:
        ray.shutdown()


def _keep_to_this_machine() -> None:
    """An own instance listens on loopback alone. (That it asks for a token Ray itself sees to.)

    On Linux Ray takes 127.0.0.1 for the machine's outer address and listens on all of them; where it expects no cluster
    it does not. Its processes read that from the environment, this one at its import of Ray.
    """
    from ray._private import ray_constants

    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in place of Prefect's, which is the one that says how a flow ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _capacity(ray: Any) -> Capacity:
    alive = [node for node in ray.nodes() if node["Alive"]]
    sizes = ((int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0))) for node in alive)
    return Capacity(
        nodes=tuple(size for size in sizes if any(size)),  # a head that takes no work has neither
        num_hosts=len({node["NodeManagerHostname"] for node in alive}),
    )


def check_feasible(wanted: float, available: int) -> None:
    """Raises ValueError when a cell wants more GPUs than one node has: Ray itself would wait for ever."""
    if wanted > available:
        raise ValueError(f"gpus={wanted} a cell is wanted, {available} are available; allowed here: 0 … {available}")


def any_node_alive() -> bool:
    """Whether the cluster has a living node: an own Ray has one in all, and when its raylet dies none comes back."""
    import ray

    return any(node["Alive"] for node in ray.nodes())


def node_alive(node_id: str) -> bool:
    """Whether a node still belongs to the cluster: an actor that dies on a living node crashed."""
    import ray

    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
