"""Thousands of cells and hundreds of workers on a fake clock, through the store's own code."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sweep_helpers import pinned

from sweeps import queries
from sweeps.cell import Cell
from sweeps.grids import ablation
from sweeps.store import Claim, ClaimLost, Store

CELL = pinned(ablation("smollm2-135m", "gdn")).cells[1]


@dataclass
class World:
    """Workers of several overlapping sweeps. Some die at work, some sleep past their claim and wake up as zombies."""

    store: Store
    cells: dict[str, Cell]
    num_sweeps: int
    rng: random.Random
    now: float = 0.0
    queues: list[deque[str]] = field(default_factory=list)
    events: list[tuple[float, int, int, str]] = field(default_factory=list)  # when, order, worker, what
    claims: dict[int, Claim] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    published: Counter[str] = field(default_factory=Counter)

    spent: Counter[str] = field(default_factory=Counter)  # seconds of this process in the store, by what it did

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.process_time()  # not what others do to the machine meanwhile
        yield
        self.spent[what] += time.process_time() - started
        self.counts[what] += 1

    def __post_init__(self) -> None:
        keys = list(self.cells)
        for _ in range(self.num_sweeps):
            self.rng.shuffle(keys)
            self.queues.append(deque(keys))

    def at(self, delay: float, worker: int, what: str) -> None:
        heapq.heappush(self.events, (self.now + delay, self.counts["events"], worker, what))
        self.counts["events"] += 1

    def run(self, num_workers: int) -> None:
        for worker in range(num_workers):
            self.at(self.rng.random() * 30, worker, "look")
        while self.events:
            self.now, _, worker, what = heapq.heappop(self.events)
            getattr(self, what)(worker)

    def look(self, worker: int) -> None:
        queue = self.queues[worker % self.num_sweeps]
        if not queue:
            return
        key = queue.popleft()
        if key in self.published and self.rng.random() < 0.9:  # as a sweep's plan says, most of the time
            self.at(0.1, worker, "look")
            return
        with self.timed("claim"):
            claim = self.store.claim(key, f"worker {worker} at {self.now}")
        if claim is None:
            self.counts["claimed elsewhere"] += 1
            queue.append(key)
            self.at(5.0, worker, "look")
        elif claim.published:
            self.store.finish(claim)
            self.at(0.1, worker, "look")
        else:
            self.claims[worker] = claim
            self.ends[worker] = self.now + self.rng.expovariate(1 / 90)
            self.at(20.0, worker, "renew")

    def renew(self, worker: int) -> None:
        fate = self.rng.random()
        if fate < 0.02:  # dies at work; another worker comes in its place
            self.counts["deaths"] += 1
            self.queues[worker % self.num_sweeps].append(self.claims.pop(worker).key)
            self.at(60.0, worker, "look")
        elif fate < 0.03:  # the machine sleeps past its claim, then goes on as if nothing had been
            self.counts["sleeps"] += 1
            self.at(self.rng.uniform(30, 200), worker, "publish")
        elif self.now + 20.0 < self.ends[worker]:
            try:
                self.store.renew(self.claims[worker])
                self.at(20.0, worker, "renew")
            except ClaimLost:
                self.lost(worker)
        else:
            self.at(max(0.0, self.ends[worker] - self.now), worker, "publish")

    def publish(self, worker: int) -> None:
        claim = self.claims[worker]
        try:
            with self.timed("publish"):
                self.store.publish(claim, self.cells[claim.key], {"fence": claim.fence})
            self.published[claim.key] += 1
            self.store.finish(claim)
            del self.claims[worker]
            self.at(1.0, worker, "look")
        except ClaimLost:
            self.lost(worker)

    def lost(self, worker: int) -> None:
        self.counts["claims lost"] += 1
        self.queues[worker % self.num_sweeps].append(self.claims.pop(worker).key)
        self.at(1.0, worker, "look")


def simulate(home: Path, num_cells: int, num_workers: int) -> World:
    cells = [Cell.from_dict({**CELL.to_dict(), "seed": seed}) for seed in range(num_cells)]
    store = Store(f"sqlite:///{home}/store.db", clock=lambda: world.now)
    world = World(store, {cell.train_key: cell for cell in cells}, 4, random.Random(0))
    world.run(num_workers)
    states, _ = queries.overview(store)
    store.close()
    assert set(world.published) == set(world.cells) and sum(s.published for s in states.values()) == num_cells
    assert max(world.published.values()) == 1, "published twice"
    assert world.counts["deaths"] and world.counts["sleeps"] and world.counts["claims lost"]
    return world


def test_workers_that_die_and_sleep_publish_every_cell_once(home: Path) -> None:
    world = simulate(home, num_cells=120, num_workers=16)
    assert len(world.published) == 120


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_ten_thousand_cells_and_two_hundred_workers(home: Path, record_property: Callable[[str, object], None]) -> None:
    """Also measures what the store costs, and that the cost of an operation does not grow with the number of cells."""
    costs: dict[int, dict[str, float]] = {}
    for num_cells in (1000, 10_000):
        (home / str(num_cells)).mkdir()
        world = simulate(home / str(num_cells), num_cells, 200)
        costs[num_cells] = {what: seconds / world.counts[what] * 1e3 for what, seconds in world.spent.items()}
        for what, milliseconds in costs[num_cells].items():
            record_property(f"milliseconds a {what} at {num_cells} cells", milliseconds)
    for what, milliseconds in costs[1000].items():
        assert costs[10_000][what] < 2 * milliseconds + 1, costs
