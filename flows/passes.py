"""Cells of one slot that train in one pass over the same batches: a thread each, which take turns at the slot and meet to train.

Everything else a cell does alone: claim, heartbeat, Prefect tasks, MLflow run, publication, scores, failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import Condition, Event, Lock
from typing import Any

from flows.slots import Slot, StageFailed
from flows.warmth import Warmth
from sweeps.cell import Cell
from sweeps.store import Claim, ClaimLost

OF_ONE = ("error", "config")  # causes that may be one cell's alone: then each trains by itself


def check_pass(cells_per_pass: int, gpus: float | None) -> None:
    """Raises ValueError for a number of cells that is not one, or of cells on several GPUs."""
    if cells_per_pass < 1:
        raise ValueError(f"cells_per_pass must be a whole number ≥ 1, not {cells_per_pass!r}")
    if cells_per_pass > 1 and (gpus or 0) > 1:
        raise ValueError(f"cells_per_pass={cells_per_pass} with gpus={gpus}: allowed for cells on one GPU or less")


@dataclass
class Member:
    """A cell that trains. stop: ends its training early. It is ``done`` when ``result`` or ``error`` says how it ended."""

    cell: Cell
    claim: Claim
    micro_batch: int
    stop: Event
    on_progress: Callable[[dict[str, Any]], None]
    done: Event = field(default_factory=Event)
    result: dict[str, Any] | None = None
    error: BaseException | None = None
    told: bool = False

    def end(self, found: dict[str, Any] | BaseException | None) -> None:
        """With a provenance, an error, or None when it was stopped."""
        if isinstance(found, BaseException):
            self.error = found
        else:
            self.result = found
        self.done.set()


class Pass:
    """For the cells with these keys. ``turn``: held by the thread that calls the slot."""

    def __init__(self, slot: Slot, warmth: Warmth, keys: Iterable[str]):
        self.slot, self.warmth, self.turn = slot, warmth, Lock()
        self._awaited = set(keys)
        self._members: list[Member] = []
        self._changed = Condition()

    def leave(self, key: str) -> None:
        """A cell that has not met the others will not come."""
        with self._changed:
            self._awaited.discard(key)
            self._changed.notify_all()

    def meet(self, member: Member) -> int:
        """Waits until all that come are there. Returns how many they are."""
        with self._changed:
            self._members.append(member)
        self.leave(member.claim.key)
        with self._changed:
            self._changed.wait_for(lambda: not self._awaited)
            return len(self._members)

    def train(self, member: Member) -> dict[str, Any] | None:
        """The cell's provenance once the pass ends, None when it was stopped; raises as ``Slot.call``. After ``meet``."""
        if member is self._members[0]:
            with self.turn:
                self._train()
        member.done.wait()
        if member.error is not None:
            raise member.error
        return member.result

    def _train(self) -> None:
        """Train all that met, as the thread of the first."""
        members = self._members
        try:
            with self.warmth.around_training(self.slot, _AllStopped(members)) as watch:
                try:
                    self._call(members, watch)
                except StageFailed as error:
                    if len(members) == 1 or error.cause not in OF_ONE:
                        raise
                    for member in self._left():
                        try:
                            self.slot.start(member.cell.base, member.stop)
                            self._call([member], watch)
                        except (StageFailed, ClaimLost) as own:
                            member.end(own)
        except BaseException as error:  # noqa: BLE001 - each thread raises it
            for member in self._left():
                member.end(error)

    def _left(self) -> list[Member]:
        return [member for member in self._members if not member.done.is_set()]

    def _call(self, members: list[Member], watch: Callable[[dict[str, Any]], None]) -> None:
        """One pass of these. A cell whose claim is lost, or that is to stop, leaves it; the others go on."""
        attempts = [member.claim.attempt for member in members]

        def on_progress(said: dict[int, dict[str, Any]]) -> None:
            for member in members:
                own = said.get(member.claim.attempt)
                if own and not member.done.is_set():
                    watch(own)
                    try:
                        member.on_progress(own)
                    except ClaimLost as error:
                        if len(members) == 1:
                            raise
                        self.slot.stop(member.claim.attempt)
                        member.end(error)
                if len(members) > 1 and member.stop.is_set() and not member.told:
                    member.told = True
                    self.slot.stop(member.claim.attempt)

        cells = [(member.cell, member.claim) for member in members]
        micro_batch = min(member.micro_batch for member in members)
        call = ("train", *cells[0]) if len(members) == 1 else ("train_together", cells)
        results = self.slot.call(
            *call, micro_batch, stop=_AllStopped(members), attempts=attempts, on_progress=on_progress
        )  # fmt: skip
        for member, result in zip(members, [results] if len(members) == 1 else results):
            if not member.done.is_set():
                member.end(result)


class _AllStopped(Event):
    """Set when none of the cells is to go on."""

    def __init__(self, members: list[Member]):
        super().__init__()
        self._members = members

    def is_set(self) -> bool:
        return all(member.done.is_set() or member.stop.is_set() for member in self._members)
