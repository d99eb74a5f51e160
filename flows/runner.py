"""Runs the cells of a sweep: claims them, calls their stages as Prefect tasks on slots, records what came out.

The store decides what is true. A cell that failed of a cause that may be tried again comes back in the next round;
cells that another sweep has claimed are waited for.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.dead import bury
from flows.passes import Member, Pass
from flows.progress import Forgiving, Progress
from flows.queue import Queue
from flows.slots import Slot, StageFailed
from flows.warmth import Warmth
from flows.workers import read_tail
from linear_core.models import resolve
from sweeps import preflight, priorities, queries, retries
from sweeps.cell import Cell, Placement
from sweeps.claims import holding
from sweeps.cost import Machine, step_bytes_name, throughput_name, train_memory
from sweeps.plan import Plan, PlanItem, make_plan
from sweeps.pruning import Divergence
from sweeps.store import Claim, ClaimLost, Store, new_holder
from sweeps.sweep import Sweep

log = logging.getLogger(__name__)
ASK_SECONDS = 3.0  # between looks at whether the sweep or the cell is cancelled
WAIT_SECONDS = 2.0  # between looks at cells that another sweep has claimed
FILES = ("new_parameters.safetensors", "recipe.json", "provenance.json", "curve.jsonl", "log.txt")
DONE, FAILED, STOPPED, PRUNED, ELSEWHERE = "done", "failed", "stopped", "pruned", "claimed elsewhere"


@task(name="stage", task_run_name="{stage} {label}", cache_policy=NO_CACHE)
def run_stage(stage: str, label: str, call: Callable[[], Any]) -> Any:
    """One stage of one cell, as Prefect sees it: its state, its duration, its exception."""
    return call()


STAGES = {name: run_stage.with_options(name=name) for name in ("convert", "train", "evaluate")}


@dataclass
class Outcome:
    """How a cell ended in this run of the flow."""

    label: str
    state: str
    reason: str = ""


@dataclass
class Runner:
    """One run of a sweep. ``say`` gets a line for people; ``parent`` is the sweep's MLflow run."""

    sweep: Sweep
    sweep_id: str
    store: Store
    tracker: Forgiving
    parent: str
    machine: Machine
    placement: Placement
    num_slots: int
    say: Callable[[str], None]
    links: dict[str, str]
    fail_fast: bool = False
    cells_per_pass: int = 1  # at most so many cells of a base model train over the same batches at a time
    prune: float | None = None  # end a cell whose loss is over so many times its best (sweeps.pruning)
    accept_base_scores: bool = False  # train on although a base model's scores are not the published ones
    worker: type | None = None  # flows.workers.Worker
    stop: Event = field(default_factory=Event)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.holder = new_holder()
        self._lock = Lock()
        self._warmth = Warmth(self.say)
        self._asked_at = 0.0  # whether the sweep is cancelled
        self._asked_for_room = False
        self._no_more = False  # start no further cell: one failed and that is enough, or the disk is full

    def run(self, plan: Plan) -> None:
        """Round after round until nothing is left that may run; ``outcomes`` and ``seconds`` (by stage) tell."""
        slots = [Slot(self.store, self.placement, self._ask_for_room, self.worker) for _ in range(self.num_slots)]
        try:
            while not self.stop.is_set():
                todo, waiting = self._open(plan)
                if todo:
                    bury(self.store, self.tracker, self.say)  # holders whose claims have expired
                    self._round(slots, todo)
                elif waiting:
                    for slot in slots:
                        slot.close()  # the others may need the place
                    self.stop.wait(WAIT_SECONDS)
                else:
                    return
                if self._no_more or not self.may_start():
                    return
                plan = make_plan(
                    self.sweep, self.store, self.machine, self.placement, accept_base_scores=self.accept_base_scores
                )
        except BaseException:
            self.stop.set()
            raise
        finally:
            for slot in slots:
                slot.close()

    def _open(self, plan: Plan) -> tuple[list[PlanItem], list[PlanItem]]:
        """Cells to run now, and cells to wait for: those claimed elsewhere and those whose base model is."""
        busy = {item.cell.base for item in plan.items if item.action == "wait" and item.cell.is_base}
        todo: list[PlanItem] = []
        waiting: list[PlanItem] = []
        for item in plan.items:
            ended = self.outcomes.get(item.key)
            if item.action == "wait" and (ended is None or ended.state == ELSEWHERE):
                self.outcomes[item.key] = Outcome(item.cell.label, ELSEWHERE, item.reason)
                waiting.append(item)
            elif item.action == "skip" and ended is not None and ended.state == ELSEWHERE:
                self.outcomes[item.key] = Outcome(item.cell.label, DONE, "done by another sweep")
            elif item.action == "refuse" and ended is None:
                self.outcomes[item.key] = Outcome(item.cell.label, FAILED, f"refused: {item.reason}")
            elif item.action == "refuse" and ended is not None and ended.state == ELSEWHERE:
                self.outcomes[item.key] = Outcome(item.cell.label, STOPPED, item.reason)
            elif item.action == "pruned" and (ended is None or ended.state == ELSEWHERE):
                self.outcomes[item.key] = Outcome(item.cell.label, PRUNED, item.reason)
            elif item.action in ("run", "resume") and (ended is None or ended.state == ELSEWHERE):
                (waiting if item.cell.base in busy and not item.cell.is_base else todo).append(item)
        return todo, waiting

    def _round(self, slots: list[Slot], todo: Iterable[PlanItem]) -> None:
        queue = Queue(todo, len(slots))
        with ThreadPoolExecutor(len(slots), thread_name_prefix="slot") as pool:
            # each thread has a copy of the flow's context, so that Prefect sees its tasks as this flow's
            futures = [pool.submit(contextvars.copy_context().run, self._serve, slot, queue) for slot in slots]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self.stop.set()
                queue.close()
                raise

    def may_start(self) -> bool:
        """Whether a cell may start: waits while the sweep is paused; False when it drains, is cancelled or stops."""
        while (state := queries.sweep_state(self.store, self.sweep_id)) == "paused":
            if self.stop.wait(WAIT_SECONDS):
                return False
        return state == "running" and not self.stop.is_set()

    def make_room(self, slot: Slot) -> None:
        """End the slot's worker while a sweep of higher priority waits for a place on the same cluster."""
        while priorities.outranked(self.store, self._priority()):
            if slot.base:
                self.say(f"worker for {slot.base} ends: a sweep of higher priority waits for a place")
            slot.close()
            if self.stop.wait(WAIT_SECONDS):
                return

    def _priority(self) -> float:
        return priorities.get(self.store).get(self.sweep_id, 0.0)

    def _ask_for_room(self) -> None:
        self._asked_for_room = True
        priorities.ask_for_room(self.store, self.holder, self._priority())

    def _has_room(self) -> None:
        if self._asked_for_room:
            self._asked_for_room = False  # another slot that still waits asks again within a second
            priorities.stop_asking(self.store, self.holder)

    def cancelled(self) -> bool:
        """Whether somebody cancelled the sweep; asked of the store every few seconds."""
        with self._lock:
            if time.monotonic() - self._asked_at < ASK_SECONDS:
                return False
            self._asked_at = time.monotonic()
        if queries.sweep_state(self.store, self.sweep_id) == "cancelled":
            self.stop.set()
        return self.stop.is_set()

    def _why_stopped(self) -> str:
        if queries.sweep_state(self.store, self.sweep_id) == "cancelled":
            return "a person cancelled the sweep"
        return "the flow ends" if self.stop.is_set() else "its claim is lost"

    def _serve(self, slot: Slot, queue: Queue) -> None:
        """Cells for one slot until there are none."""
        while self.may_start():
            self.make_room(slot)
            ranks = priorities.get(self.store)
            item = queue.take(slot.base, ranks)
            if item is None:
                break
            items = [item]
            if self.cells_per_pass > 1 and item.train and self._may_share(item):
                items += queue.companions(item, self.cells_per_pass - 1, self._may_share, ranks)
            for item, outcome in zip(items, self._cells(slot, items)):
                self._ended(queue, item, outcome)
            if self.stop.is_set() or self._no_more:
                queue.close()
        queue.close()
        slot.close()  # what is left of the round runs on the other slots

    def _may_share(self, item: PlanItem) -> bool:
        return not retries.must_be_alone(queries.attempts_at(self.store, item.key).failures)

    def _cells(self, slot: Slot, items: list[PlanItem]) -> list[Outcome | None]:
        """Run cells on a slot; several in a thread each, which train in one pass."""
        together = Pass(slot, self._warmth, [item.key for item in items])
        if len(items) == 1:
            return [self._cell(slot, items[0], together)]
        with ThreadPoolExecutor(len(items), thread_name_prefix="cell") as pool:
            run = [pool.submit(contextvars.copy_context().run, self._cell, slot, item, together) for item in items]
        return [each.result() for each in run]

    def _ended(self, queue: Queue, item: PlanItem, outcome: Outcome | None) -> None:
        """Remember how a cell ended, and what that means for the cells of a base model."""
        with self._lock:
            if outcome is None:
                self.outcomes.pop(item.key, None)  # comes back in the next round
            else:
                self.outcomes[item.key] = outcome
            scored = outcome is not None and outcome.state == DONE
            doubt = self._doubt(item) if scored else ""
            for other in queue.finished(item, scored=scored and not doubt):
                if doubt:
                    self.outcomes[other.key] = Outcome(other.cell.label, FAILED, f"refused: {doubt}")
                elif outcome is not None:
                    reason = f"its base model was not scored ({outcome.reason})"
                    self.outcomes[other.key] = Outcome(other.cell.label, outcome.state, reason)
        if self.fail_fast and outcome is not None and outcome.state == FAILED:
            self._no_more = True

    def _doubt(self, item: PlanItem) -> str:
        """Why no cell of the base model that was just scored may be trained: its scores are not the published ones."""
        if not item.cell.is_base or self.accept_base_scores:
            return ""
        doubt = preflight.doubts(self.store, self.sweep).get(item.cell.base, "")
        if doubt:
            self.say(f"{item.cell.label}: {doubt}")
        return doubt

    def _cell(self, slot: Slot, item: PlanItem, together: Pass) -> Outcome | None:
        """Claim, run and record one cell. None: it failed of a cause that is tried again."""
        try:
            return self._claimed(slot, item, together)
        finally:
            together.leave(item.key)

    def _claimed(self, slot: Slot, item: PlanItem, together: Pass) -> Outcome | None:
        label = item.cell.label
        claim = self.store.claim(item.key, self.holder)
        if claim is None:
            return Outcome(label, ELSEWHERE, "claimed by another sweep a moment ago")
        still = item.as_claimed(claim)
        if still is None:
            self.store.finish(claim)
            return Outcome(label, DONE, "done by another sweep")
        item = still
        tags = {**self.links, "attempt": str(claim.attempt), "store": self.store.name}
        if self.placement.num_gpus:
            tags["hardware"] = self.machine.gpu
        sources = [(task, self.sweep.source_of(task).source) for task, _ in item.tasks]
        run_id = self.tracker.start_cell(self.parent, item.cell, sweep_id=self.sweep_id, tags=tags, tasks=sources)
        try:
            self.store.note(claim, tracking_run=run_id)
            with holding(self.store, claim) as lost:
                failed = self._stages(slot, item, claim, run_id, lost, together)
            self.tracker.log_files(run_id, self._files(claim, item.train and failed is not None), FILES)
            if failed is None:
                raise StageFailed("preempted", f"it was stopped: {self._why_stopped()}")
            if failed:
                raise StageFailed("error", "; ".join(f"{task}: {reason}" for task, reason in failed.items()))
            self.store.finish(claim)
            self.tracker.end(run_id)
            return Outcome(label, DONE)
        except ClaimLost as error:
            return self._lost(item, run_id, error)
        except StageFailed as error:
            return self._failed(item, claim, run_id, error)
        except BaseException as error:
            reason = f"the flow ended: {type(error).__name__}: {error}"
            self._failed(item, claim, run_id, StageFailed("preempted", reason))
            raise

    def _files(self, claim: Claim, published: bool) -> Path:
        """The attempt's folder on this machine, with what was published from another node."""
        try:
            return self.store.blobs.fetch(claim.blob) if published else self.store.folder(claim)
        except OSError as error:
            log.warning("files of %s are not here: %s", claim.blob, error)
            return self.store.folder(claim)

    def _stages(
        self, slot: Slot, item: PlanItem, claim: Claim, run_id: str, lost: Event, together: Pass
    ) -> dict[str, str] | None:
        """Convert, train and evaluate as the plan says. Returns tasks that failed, with reasons; None when stopped."""
        cell = item.cell
        divergence = Divergence(self.prune) if self.prune else None
        # MLflow compares runs first by a metric that all have: without the base model's load that is a score
        progress = Progress(
            cell.label, self.say, self.tracker, self.store, claim, run_id, divergence, machine=not cell.is_base
        )
        halt = _Any(self.stop.is_set, lost.is_set, self.cancelled, _NowAndThen(lambda: not self.store.holds(claim)))
        diverged = _Any(halt.is_set, lambda: bool(progress.diverged))

        def timed(name: str, work: Callable[[], Any], share: int = 1) -> Any:
            started = time.monotonic()
            try:
                return work()
            finally:
                with self._lock:
                    self.seconds[name] += (time.monotonic() - started) / share

        def on_progress(said: dict[int, dict[str, Any]]) -> None:
            if claim.attempt in said:
                progress(said[claim.attempt])

        def stage(name: str, *arguments: Any) -> Any:
            call = lambda: slot.call(  # noqa: E731
                name, cell, claim, *arguments, stop=halt, attempts=[claim.attempt], on_progress=on_progress
            )
            timed("worker start", lambda: slot.start(cell.base, halt))
            self._has_room()
            return timed(name, lambda: STAGES[name](name, cell.label, call))

        num_together = 1
        if item.train and cell.train is not None:
            failures = queries.attempts_at(self.store, item.key).failures
            micro_batch = retries.micro_batch(cell.train.batch_size // max(1, int(self.placement.num_gpus)), failures)
            with together.turn:
                stage("convert")
            member = Member(cell, claim, micro_batch, diverged, progress)
            num_together = together.meet(member)
            train = lambda: STAGES["train"]("train", cell.label, lambda: together.train(member))  # noqa: E731
            found = timed("train", train, share=num_together)
            if found is None and progress.diverged:
                raise StageFailed("pruned", progress.diverged)
            if found is None:
                return None
            progress.trained(cell, found)
            rate = found.get("training", {}).get("tokens_per_second")
            if rate and num_together == 1:  # a pass says nothing of a cell alone
                queries.measure(self.store, throughput_name(self.machine, cell), float(rate) / found["training"].get("ranks", 1))
            if step := self._step_bytes(cell, found):
                queries.measure(self.store, step_bytes_name(self.machine, cell), step)
        if halt.is_set():
            return None
        with together.turn:
            # after others of the pass it may be another process, on another node
            measured = stage("evaluate", item.tasks, item.train and num_together == 1)
            if measured is not None and not slot.call("settle"):
                slot.close()
        if measured is None:
            return None
        scores, failed = measured
        base = [] if cell.is_base else queries.scores_of(self.store, [cell.base_of().train_key])
        self.tracker.log_scores(run_id, cell, scores, base=[score for _, _, score in base])
        progress.scored(scores)
        return failed

    def _step_bytes(self, cell: Cell, found: dict[str, Any]) -> float | None:
        """What a sequence of a finished training took above model and optimiser, for later plans; on a GPU, where it is known."""
        training = found["training"]
        whole = training.get("ranks", 1) == training.get("cells", 1) == 1 and not training.get("activation_checkpointing")
        if cell.train is None or not self.placement.num_gpus or not training.get("micro_batch") or not whole:
            return None
        model = train_memory(resolve(cell.base).shape, cell.recipe, cell.train, self.placement, 0.0)
        return max(0.0, training["peak_memory"] - model) / training["micro_batch"]

    def _lost(self, item: PlanItem, run_id: str, error: ClaimLost) -> Outcome:
        """A person cancelled the cell, or another sweep took it over."""
        newest = queries.attempts_at(self.store, item.key)
        cancelled = newest.last_state == "cancelled"
        reason = newest.last_reason if cancelled else str(error)
        self.tracker.end(run_id, "KILLED", reason)
        return Outcome(item.cell.label, STOPPED if cancelled else ELSEWHERE, reason)

    def _failed(self, item: PlanItem, claim: Claim, run_id: str, error: StageFailed) -> Outcome | None:
        """Record a failure in store and MLflow. None when the cell may be tried again in this run."""
        status = "KILLED" if error.cause in ("preempted", "cancelled", "pruned") else "FAILED"
        tail = error.log_tail or read_tail(self.store.folder(claim))
        counted = error.counted and (error.cause != "preempted" or not self.stop.is_set())
        try:
            self.store.fail(claim, error.cause, error.reason, traceback=error.traceback, log_tail=tail, counted=counted)
        except ClaimLost as lost:
            return self._lost(item, run_id, lost)
        self.tracker.log_text(run_id, f"{error.reason}\n\n{error.traceback}\n\n{tail}", "failure.txt")
        self.tracker.end(run_id, status, f"{error.cause}: {error.reason}")
        self.say(f"{item.cell.label}: {error.cause}: {error.reason}")
        if error.cause == "disk":
            self._no_more = True  # the next cells would fail alike
        if error.cause == "pruned":
            return Outcome(item.cell.label, PRUNED, error.reason)
        if self.stop.is_set():
            return Outcome(item.cell.label, STOPPED, error.reason)
        failures = queries.attempts_at(self.store, item.key).failures
        if retries.RETRIES[error.cause] and retries.may_retry(failures, error.cause):
            self.stop.wait(retries.wait_seconds(failures, error.cause))
            return None
        return Outcome(item.cell.label, FAILED, f"{error.cause}: {error.reason}")


class _NowAndThen:
    """A condition that asks the store: looked at every few seconds, true for good once it was."""

    def __init__(self, condition: Callable[[], bool]):
        self._condition, self._at, self._holds = condition, time.monotonic(), False

    def __call__(self) -> bool:
        if not self._holds and time.monotonic() - self._at >= ASK_SECONDS:
            self._at, self._holds = time.monotonic(), self._condition()
        return self._holds


class _Any(Event):
    """Set when one of several conditions holds: the flow stops, the claim is lost, the sweep is cancelled."""

    def __init__(self, *conditions: Callable[[], bool]):
        super().__init__()
        self._conditions = conditions

    def is_set(self) -> bool:
        return any(condition() for condition in self._conditions)
