"""Kernels are compiled once for a kind of GPU: the first worker of a flow that trains on it does, the others wait and fetch.

The first steps of a training compile for minutes. With ``GOLINEAR_KERNELS`` (sweeps.kernels) the nodes of a cluster share
what one of them compiled; without it the workers of one node do, through its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock
from typing import Any

from sweeps import kernels

WAIT_SECONDS = 600.0  # at most, for another worker's first steps
LOOK_SECONDS = 1.0

Watch = Callable[[dict[str, Any]], None]


class Warmth:
    """For the threads of a flow's slots. A slot has ``call(method, …)`` and a ``node``."""

    def __init__(self, say: Callable[[str], None] = lambda _line: None) -> None:
        self.url, self.say = kernels.place(), say
        self._lock = Lock()
        self._warm: dict[str, Event] = {}  # kind → set when its kernels are there, or when nobody makes them any more

    @contextmanager
    def around_training(self, slot: Any, stop: Event) -> Iterator[Watch]:
        """Around a cell's training: waits for kernels that another worker compiles. Yields what is to see its progress."""
        kind = slot.call("kernels")
        if not kind:  # on a CPU
            yield lambda _said: None
            return
        shared = kind if self.url else f"{kind} on {slot.node}"
        with self._lock:
            first = shared not in self._warm
            warm = self._warm.setdefault(shared, Event())
        if not first:
            until = time.monotonic() + WAIT_SECONDS
            while not (warm.is_set() or stop.is_set() or time.monotonic() > until):
                warm.wait(LOOK_SECONDS)
        if self.url and slot.call("fetch_kernels", self.url) and first:
            warm.set()  # an earlier sweep compiled them
        told = False

        def watch(said: dict[str, Any]) -> None:
            nonlocal told
            if said.get("rows") and not told:  # the first steps are done
                told = True
                if self.url and (number := slot.call("publish_kernels", self.url)):
                    self.say(f"compiled kernels of {kind}: {number} files at {self.url}")
                warm.set()

        try:
            yield watch
        finally:
            warm.set()
