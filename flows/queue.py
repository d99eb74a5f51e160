"""Hands cells to slots: base models first, a cell only when its base model is scored, a slot keeps its base model."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Condition

from sweeps.plan import PlanItem


class Queue:
    """Cells to do, shared by the threads of all slots. Order: the plan's, which has each base model in front."""

    def __init__(self, items: Iterable[PlanItem]):
        self._left = list(items)
        self._bases_open = {item.cell.base for item in self._left if item.cell.is_base}
        self._changed = Condition()
        self._closed = False

    def take(self, base: str = "") -> PlanItem | None:
        """The next cell that may run, of ``base`` if possible; waits while all left are blocked; None: all taken."""
        with self._changed:
            while self._left and not self._closed:
                ready = [item for item in self._left if item.cell.is_base or item.cell.base not in self._bases_open]
                if ready:
                    chosen = next((item for item in ready if item.cell.base == base), ready[0])
                    self._left.remove(chosen)
                    return chosen
                self._changed.wait()
            return None

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
