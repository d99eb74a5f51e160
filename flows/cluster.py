"""Ray for one flow: an own loopback instance, or the cluster that RAY_ADDRESS names, which is left running."""

from __future__ import annotations

import logging
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
    """What a cluster can give in all: whole GPUs and CPUs, and nodes; and the CPUs of the smallest node for cells."""

    gpus: int
    cpus: int
    nodes: int
    node_cpus: int

    def cpus_of_a_cell(self, num_slots: int) -> int:
        """CPUs for each of so many cells at a time: a cell runs on one node, so they are shared node by node."""
        working = max(1, self.cpus // max(1, self.node_cpus))
        return max(1, self.node_cpus // -(-num_slots // working))


@contextmanager
def cluster() -> Iterator[Capacity]:
    """Connect (or start Ray on this machine), yield what there is, disconnect. A Ray that was there before stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    if ray.is_initialized():
        yield _capacity(ray)
        return
    address = os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
        "_system_config": {"worker_niceness": 0},  # 15 by default: a loaded machine would starve the training
    }
    with _signals_kept():
        ray.init(**({"address": address} if address else own), log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield _capacity(ray)
    finally:
        ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray puts its own handler of SIGTERM in place of Prefect's, which is the one that says how a flow ended."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _capacity(ray: Any) -> Capacity:
    total = ray.cluster_resources()
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    working = [there for there in alive if there.get("CPU", 0) >= 1]  # a head may offer none
    with_gpu = [there for there in working if there.get("GPU", 0) >= 1]
    smallest = min((int(there["CPU"]) for there in with_gpu or working), default=1)
    return Capacity(gpus=int(total.get("GPU", 0)), cpus=int(total.get("CPU", 1)), nodes=len(alive), node_cpus=smallest)


def check_feasible(wanted: int, available: int) -> None:
    """Raises ValueError when a cell wants more GPUs than there are: Ray itself would wait for ever."""
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
