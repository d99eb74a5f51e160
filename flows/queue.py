"""Hands cells to slots by priority: base models first, a cell only when its base model is scored, a slot keeps its base."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Condition

from sweeps.plan import PlanItem


class Queue:
    """Cells to do, shared by the threads of all slots. Order: the plan's, which has each base model in front."""

    def __init__(self, items: Iterable[PlanItem], num_slots: int = 1):
        self._left = list(items)
        self._num_slots = num_slots
        self._sharing = Counter(item.cell.batches for item in self._left if item.train)
        self._bases_open = {item.cell.base for item in self._left if item.cell.is_base}
        self._changed = Condition()
        self._closed = False

    def take(self, base: str = "", priorities: Mapping[str, float] | None = None) -> PlanItem | None:
        """The next cell that may run: of the highest priority (by key, else 0), then of ``base`` if possible.

        A base model is as urgent as its most urgent cell. Waits while all left are blocked; None: all are taken.
        """
        with self._changed:
            while self._left and not self._closed:
                ready = [item for item in self._left if item.cell.is_base or item.cell.base not in self._bases_open]
                if ready:
                    ranks = self._ranks(priorities or {})
                    chosen = max(ready, key=lambda item: (ranks[item.key], item.cell.base == base))  # the first of equals
                    self._left.remove(chosen)
                    return chosen
                self._changed.wait()
            return None

    def companions(
        self, item: PlanItem, at_most: int, allowed: Callable[[PlanItem], bool], priorities: Mapping[str, float] | None = None
    ) -> list[PlanItem]:
        """Up to so many further cells to train over the batches of one that was taken, none that another slot would lack.

        The most urgent first, then those whose checkpoint is nearest.
        """
        batches = item.cell.batches
        fair = math.ceil(self._sharing[batches] / self._num_slots) - 1
        with self._changed:
            if self._closed:
                return []
            ranks = self._ranks(priorities or {})
            same = [other for other in self._left if other.train and other.cell.batches == batches]
            same.sort(key=lambda other: (-ranks[other.key], abs(other.resume_tokens - item.resume_tokens)))
            chosen: list[PlanItem] = []
            for other in same:
                if len(chosen) < min(at_most, fair) and allowed(other):
                    chosen.append(other)
                    self._left.remove(other)
            return chosen

    def _ranks(self, priorities: Mapping[str, float]) -> dict[str, float]:
        ranks = {item.key: priorities.get(item.key, 0.0) for item in self._left}
        for base in (item for item in self._left if item.cell.is_base):
            ranks[base.key] = max(ranks[item.key] for item in self._left if item.cell.base == base.cell.base)
        return ranks

    def finished(self, item: PlanItem, *, scored: bool) -> list[PlanItem]:
        """Say that a cell ended. The cells that can no longer run, when it was a base model that was not scored."""
        with self._changed:
            blocked: list[PlanItem] = []
            if item.cell.is_base:
                self._bases_open.discard(item.cell.base)
                if not scored:
                    blocked = [other for other in self._left if other.cell.base == item.cell.base]
                    self._left = [other for other in self._left if other not in blocked]
            self._changed.notify_all()
            return blocked

    def close(self) -> None:
        """Give out no more cells."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
