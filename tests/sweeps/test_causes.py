"""What a failure stands for, when a run has diverged, and what goes first."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from sweep_helpers import pinned

from flows.passes import check_pass
from flows.queue import Queue
from sweeps import priorities, retries
from sweeps.grids import ablation
from sweeps.plan import PlanItem
from sweeps.pruning import Divergence
from sweeps.store import Store


class HubError(Exception):
    def __init__(self, status: int):
        super().__init__(f"{status} for url")
        self.response = SimpleNamespace(status_code=status)


def raised(error: Exception, source: Exception) -> Exception:
    error.__context__ = source
    return error


@pytest.mark.parametrize(("error", "cause"), [
    (OSError(28, "No space left on device"), "disk"),
    (raised(ValueError("checkpoint"), OSError(28, "No space left on device")), "disk"),
    (RuntimeError("(sqlite3.OperationalError) database or disk is full"), "disk"),
    (raised(OSError("cannot load tiny/model"), HubError(429)), "network"),
    (HubError(503), "network"), (raised(OSError("x"), HubError(404)), "error"), (HubError(401), "error"),
    (raised(ValueError("hub data set broke off"), TimeoutError("read")), "network"),
    (ConnectionResetError("peer"), "network"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "oom"),
    (ValueError("batch"), "config"), (MemoryError(), "oom"), (FloatingPointError("nan"), "nonfinite"), (KeyError("x"), "error"),
])  # fmt: skip
def test_cause(error: Exception, cause: str) -> None:
    assert retries.cause_of(error) == cause


def test_a_busy_hub_is_given_time() -> None:
    waits = [retries.wait_seconds({"network": n}, "network") for n in range(1, 7)]
    assert waits == [5, 10, 20, 40, 60, 60] and retries.wait_seconds({"oom": 1}, "oom") == 0
    assert retries.may_retry({"network": 5}, "network") and not retries.may_retry({"network": 6}, "network")
    assert not retries.may_retry({"disk": 1}, "disk") and not retries.exhausted({"disk": 3})


def test_divergence_is_told_from_noise_and_from_slow_starts() -> None:
    def curve(*losses: float) -> list[dict[str, Any]]:
        return [{"tokens_seen": 64 * i, "loss": loss} for i, loss in enumerate(losses, 1)]

    fine = Divergence(1.5)
    assert not fine.see(curve(*(4 + 0.5 * math.sin(i) for i in range(100)), *(3.0,) * 50))
    assert not Divergence(1.5).see(curve(9, 9, 9, 9, 1)), "before ten steps nothing is said"
    bad = Divergence(1.5)
    assert not bad.see(curve(*(4.0,) * 20))
    assert bad.see(curve(*(9.0,) * 6)) == "loss 6.5 at token 320 is over 1.5 times its best, 4"
    assert bad.see(curve(4.0)) == bad.reason, "once said, it stays said"
    for factor in (1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="above 1"):
            Divergence(factor)


def test_urgent_cells_and_their_base_models_are_taken_first() -> None:
    sweep = pinned(ablation("smollm2-135m,qwen3-0.6b-base", "gdn", "56+8", "none", "1,2"))
    items = [PlanItem(cell=cell, key=cell.train_key, action="run") for cell in sweep.cells]
    urgent = items[-1]
    queue, order = Queue(items), []
    while (item := queue.take(priorities={urgent.key: 2, items[1].key: -1})) is not None:
        order.append(item)
        queue.finished(item, scored=True)
    assert [item.cell.base for item in order[:2]] == ["qwen3-0.6b-base"] * 2 and order[1] is urgent
    assert order[-1] is next(item for item in items if item.key == items[1].key)


def test_cells_with_the_same_batches_share_a_pass_and_no_slot_goes_without() -> None:
    sweep = pinned(ablation("smollm2-135m", "gdn,gla,kgla,hedgehog,none", "56+8", "none", "1,2"))
    items = [PlanItem(cell=cell, key=cell.train_key, action="run", train=not cell.is_base) for cell in sweep.cells]
    first, further, urgent = items[1], items[3], items[9]
    items[3] = dataclasses.replace(further, resume_tokens=4096)
    seeds = [item.cell.seed for item in items]
    assert seeds[1::2] == [1] * 5 and seeds[2::2] == [2] * 5, "five recipes of each seed"

    def companions(num_slots: int, at_most: int) -> list[PlanItem]:
        queue = Queue(items, num_slots)
        queue.take()
        queue.finished(items[0], scored=True)
        assert queue.take() is first
        return queue.companions(first, at_most, lambda item: item is not items[5], {urgent.key: 2})

    assert companions(1, 9) == [urgent, items[7], items[3]], "the urgent first, the one that is far on last"
    assert companions(1, 1) == [urgent] and companions(2, 9) == [urgent, items[7]] and companions(5, 9) == []


def test_who_trains_alone() -> None:
    assert not retries.must_be_alone({"preempted": 9, "crash": 1, "network": 2})
    assert retries.must_be_alone({"oom": 1}) and retries.must_be_alone({"crash": 2})
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="≥ 1"):
            check_pass(wrong, None)
    with pytest.raises(ValueError, match="gpus=2"):
        check_pass(2, 2)
    check_pass(4, 0.5)


def test_a_sweep_that_waits_for_a_place_outranks_lower_ones_for_a_while(store: Store) -> None:
    priorities.put(store, "urgent-1", 3)
    priorities.put(store, "late-1", -1)
    priorities.put(store, "late-1", 0)
    assert priorities.get(store) == {"urgent-1": 3}
    assert not priorities.outranked(store, 0)
    priorities.ask_for_room(store, "a", 3)
    priorities.ask_for_room(store, "a", 3)
    assert priorities.outranked(store, 0) and not priorities.outranked(store, 3)
    priorities.stop_asking(store, "a")
    assert not priorities.outranked(store, 0)
    later = Store(store.url, clock=lambda: 0.0)
    priorities.ask_for_room(later, "dead", 9)
    assert not priorities.outranked(store, 0), "a sweep that died while it waited holds nobody up"
