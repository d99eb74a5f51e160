"""Claims, publishing and housekeeping on a real database; workers are real processes that die by SIGKILL."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sweep_helpers import finish, pinned, score

from sweeps import housekeeping, queries, schema
from sweeps.cell import Cell
from sweeps.claims import holding
from sweeps.grids import ablation
from sweeps.mirror import mirrored
from sweeps.plan import PlanItem
from sweeps.store import Claim, ClaimLost, Store, new_holder

SWEEP = pinned(ablation("smollm2-135m", "gdn,gla", "56+8", "none", "1,2", tasks="mmlu,piqa"))
CELL = SWEEP.cells[1]
KEY = CELL.train_key
TASK, SCORE_KEY = SWEEP.score_keys(CELL)[0]


@pytest.fixture(params=["sqlite", "postgres"])
def any_store(request: pytest.FixtureRequest, home: Path) -> Iterator[Store]:
    """A store with claims that live a second, on SQLite and, where there is one, on Postgres."""
    url = request.getfixturevalue("postgres_url") if request.param == "postgres" else None
    opened = Store(url, expires_after=1.0)
    with opened.engine.begin() as connection:
        for table in schema.metadata.tables.values():
            connection.execute(sa.delete(table))
    yield opened
    opened.close()


def claim(store: Store, key: str = KEY, holder: str = "a") -> Claim:
    taken = store.claim(key, holder)
    assert taken is not None
    return taken


def test_one_holder_at_a_time_and_one_takeover(any_store: Store) -> None:
    first = claim(any_store)
    assert any_store.claim(KEY, "b") is None
    any_store.note(first, tokens=512)
    time.sleep(1.1)
    second = claim(any_store, holder="b")
    assert second.fence == first.fence + 1 and any_store.claim(KEY, "c") is None
    for write in (any_store.renew, any_store.finish, lambda c: any_store.publish(c, CELL, {}),
                  lambda c: any_store.put_scores(c, SCORE_KEY, [score(TASK, 0.5)]),
                  lambda c: any_store.fail(c, "crash", "late")):  # fmt: skip
        with pytest.raises(ClaimLost):
            write(first)
    state = queries.overview(any_store)[0][KEY]
    assert state.holder == "b" and state.resume_tokens == 512 and state.failures == {"preempted": 1}
    any_store.publish(second, CELL, {"seconds": 1})
    any_store.finish(second)
    again = claim(any_store, holder="c")
    assert again.published and not queries.overview(any_store)[0][KEY].failures


def test_an_expired_claim_publishes_nothing_even_when_nobody_took_it(any_store: Store) -> None:
    late = claim(any_store)
    time.sleep(1.1)
    with pytest.raises(ClaimLost, match="expired or was taken over"):
        any_store.publish(late, CELL, {})
    assert not queries.overview(any_store)[0][KEY].published


def test_a_heartbeat_keeps_the_claim_and_notices_its_loss(any_store: Store) -> None:
    with holding(any_store, claim(any_store)) as lost:
        time.sleep(1.5)
        assert any_store.claim(KEY, "b") is None and not lost.is_set()
        with any_store.engine.begin() as connection:  # as if this machine had slept through its time
            connection.execute(sa.update(schema.claims).values(expires_at=0.0))
        claim(any_store, holder="b")
        assert lost.wait(2.0)


def test_scores_are_stored_task_by_task_and_a_value_stays(any_store: Store) -> None:
    taken = claim(any_store)
    any_store.put_scores(taken, SCORE_KEY, [score(TASK, None)])
    assert queries.overview(any_store)[1] == set(), "a missing score is not a result"
    any_store.put_scores(taken, SCORE_KEY, [score(TASK, 0.5), score(TASK, 9.0, "perplexity")])
    any_store.put_scores(taken, SCORE_KEY, [score(TASK, 0.7)])
    stored = {s.metric: s.value for _, key, s in queries.scores_of(any_store) if key == SCORE_KEY}
    assert stored == {"acc": 0.5, "perplexity": 9.0}
    any_store.fail(taken, "error", "the other task broke")
    assert claim(any_store).scored == {SCORE_KEY}


def test_other_inputs_under_a_published_key_are_refused(store: Store) -> None:
    taken = claim(store)
    store.publish(taken, CELL, {})
    with store.engine.begin() as connection:
        connection.execute(sa.update(schema.results).values(inputs={**CELL.inputs, "data": "other"}))
    with pytest.raises(ValueError, match="other inputs"):
        store.publish(taken, CELL, {})
    with pytest.raises(ValueError, match="but the cell is"):
        store.publish(taken, SWEEP.cells[2], {})


def test_failures_retry_and_forget(store: Store) -> None:
    store.fail(claim(store), "nonfinite", "loss is nan at step 3", traceback="Traceback …", log_tail="last words")
    failure = queries.failures(store)[0]
    assert (failure.cause, failure.reason, failure.log_tail) == ("nonfinite", "loss is nan at step 3", "last words")
    assert queries.failures(store, KEY[:20]) == [failure]
    assert queries.find_key(store, KEY[-16:]) == KEY
    assert queries.overview(store)[0][KEY].failures == {"nonfinite": 1}
    assert queries.retry(store, [KEY]) == 1 and not queries.overview(store)[0][KEY].failures
    finish(store, SWEEP, CELL, {"mmlu": 0.5})
    finish(store, SWEEP, SWEEP.cells[2], {"mmlu": 0.6})
    assert queries.failures(store) == []
    folder = store.published_folder(KEY)
    busy = claim(store)
    with pytest.raises(ValueError, match="being worked on by a"):
        queries.forget(store, KEY)
    store.finish(busy)
    assert queries.forget(store, KEY) == 3 and not folder.exists()
    states, scored = queries.overview(store)
    assert not states[KEY].published and scored == {SWEEP.score_keys(SWEEP.cells[2])[0][1]}
    with pytest.raises(ValueError, match="is not in the store"):
        queries.forget(store, "nonsense")
    with pytest.raises(ValueError, match="names 2 cells"):
        queries.find_key(store, "smollm2")


def test_sweeps_are_kept_whole_and_found_by_name(store: Store) -> None:
    queries.save_sweep(store, "run-1", SWEEP)
    assert queries.load_sweep(store) == queries.load_sweep(store, "ablation") == ("run-1", SWEEP)
    queries.set_sweep_state(store, "run-1", "paused")
    assert queries.sweep_state(store, "run-1") == "paused" and queries.list_sweeps(store)[0]["name"] == "ablation"
    for wrong in (("run-1", "asleep"), ("run-2", "paused")):
        with pytest.raises(ValueError, match=r"is not known|is not in the store"):
            queries.set_sweep_state(store, *wrong)


def test_travels_to_other_processes_and_refuses_other_databases(store: Store) -> None:
    copy = pickle.loads(pickle.dumps(store))
    assert copy.claim(KEY, "a") is not None and store.claim(KEY, "b") is None
    copy.close()
    for url, words in (("mysql://x/y", "sqlite:////path"), ("sqlite://", "all processes see")):
        with pytest.raises(ValueError, match=words):
            Store(url)


# real processes


def work(url: str, cells: list[Cell], ledger: Path, seed: int, pause: float) -> None:
    """A worker: claims whatever is open, until all is published. Each publication is written to a ledger afterwards."""
    rng = random.Random(seed)
    store = Store(url, expires_after=1.5)
    todo = {cell.train_key: cell for cell in cells}
    while todo:
        done = {key for key, state in queries.overview(store)[0].items() if state.published}  # as a plan sees them
        todo = {key: cell for key, cell in todo.items() if key not in done}
        for key in rng.sample(list(todo), min(len(todo), 50)):
            taken = store.claim(key, new_holder())
            if taken is None:
                continue
            try:
                with holding(store, taken):
                    if not taken.published:
                        time.sleep(pause * rng.random())
                        store.publish(taken, todo[key], {"fence": taken.fence})
                        with ledger.open("a") as file:
                            file.write(f"{key}\n")
                    store.finish(taken)
            except ClaimLost:  # on a busy machine even an honest worker may be too late: it looks for the next cell
                continue
            del todo[key]
        time.sleep(0.05)
    store.close()


def slaughter(
    url: str, home: Path, *, num_cells: int, num_processes: int, num_kills: int, pause: float, limit: float
) -> Counter[str]:
    """Run workers, SIGKILL random ones and start others in their place; returns how often each key was published."""
    cells = [Cell.from_dict({**CELL.to_dict(), "seed": seed}) for seed in range(num_cells)]
    ledger, rng = home / "ledger", random.Random(1)
    ledger.touch()
    context = multiprocessing.get_context("fork")
    started = 0

    def start() -> multiprocessing.process.BaseProcess:
        nonlocal started
        started += 1
        process = context.Process(target=work, args=(url, cells, ledger, started, pause), daemon=True)
        process.start()
        return process

    workers = [start() for _ in range(num_processes)]
    kills, deadline = 0, time.monotonic() + limit
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02 + 0.1 * rng.random())
        if kills < num_kills and len(ledger.read_text().splitlines()) > num_cells * kills / (num_kills + 1):
            victim = rng.randrange(num_processes)
            if workers[victim].is_alive():
                os.kill(workers[victim].pid or 0, signal.SIGKILL)
                workers[victim].join()
                kills += 1
                workers[victim] = start()
    assert kills == num_kills and not any(worker.is_alive() for worker in workers), f"{kills} kills by the time limit"
    assert all(worker.exitcode == 0 for worker in workers)
    store = Store(url)
    states, _ = queries.overview(store)
    store.close()
    assert sum(state.published for state in states.values()) == num_cells, "nothing lost"
    return Counter(ledger.read_text().split())


def test_processes_killed_at_work_lose_nothing_and_publish_nothing_twice(any_store: Store, home: Path) -> None:
    any_store.close()
    published = slaughter(any_store.url, home, num_cells=60, num_processes=3, num_kills=8, pause=0.05, limit=60)
    assert max(published.values()) == 1


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_eight_processes_two_thousand_cells_two_hundred_kills(home: Path) -> None:
    published = slaughter(
        f"sqlite:///{home}/store.db", home, num_cells=2000, num_processes=8, num_kills=200, pause=0.3, limit=800
    )
    assert max(published.values()) == 1
    assert len(published) >= 2000 - 200, "only a worker killed between its commit and its note is missing here"


def test_many_processes_may_open_a_fresh_store_at_once(home: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=Store, args=(f"sqlite:///{home}/fresh.db",)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8


# housekeeping


def test_cancel_takes_the_cell_from_its_holder_until_a_retry(any_store: Store) -> None:
    at_work = claim(any_store)
    assert queries.cancel(any_store, KEY, "ada")
    with pytest.raises(ClaimLost):
        any_store.renew(at_work)
    failure = queries.failures(any_store)[0]
    assert (failure.state, failure.reason) == ("cancelled", "cancelled by ada")
    assert queries.overview(any_store)[0][KEY].failures == {"cancelled": 1}
    assert not queries.cancel(any_store, KEY, "ada"), "nobody is at work now"
    queries.retry(any_store, [KEY])
    assert not queries.overview(any_store)[0][KEY].failures
    with pytest.raises(ValueError, match="never started"):
        queries.cancel(any_store, "nonsense", "ada")


def test_garbage_is_what_no_result_and_no_resumption_needs(store: Store) -> None:
    def attempt(key: str) -> tuple[Claim, Path]:
        taken = claim(store, key)
        (store.folder(taken) / "checkpoints" / "step-00000001").mkdir(parents=True)
        (store.folder(taken) / "checkpoints" / "step-00000001" / "state").write_bytes(b"x" * 100)
        (store.folder(taken) / "curve.jsonl").write_text("{}")
        return taken, store.folder(taken)

    failed, failed_folder = attempt(KEY)
    store.fail(failed, "preempted", "SIGTERM")
    assert housekeeping.leftovers(store) == [], "the next attempt goes on from it"
    done, done_folder = attempt(KEY)
    store.publish(done, CELL, {})
    assert housekeeping.leftovers(store) == [], "still being measured"
    store.finish(done)
    unfinished, unfinished_folder = attempt(SWEEP.cells[2].train_key)
    store.fail(unfinished, "crash", "gone")
    found = housekeeping.leftovers(store)
    assert [leftover.path for leftover in found] == [failed_folder, done_folder / "checkpoints"]
    assert housekeeping.remove(found) == 202 and housekeeping.leftovers(store) == []
    assert (done_folder / "curve.jsonl").exists() and (unfinished_folder / "checkpoints").exists()


def test_what_another_sweep_did_meanwhile_is_not_done_again(store: Store) -> None:
    item = PlanItem(cell=CELL, key=KEY, action="run", train=True, tasks=SWEEP.score_keys(CELL))
    assert item.as_claimed(Claim(key=KEY, holder="a", fence=1, attempt=1)) == item
    finish(store, SWEEP, CELL, {"mmlu": 0.5})
    left = item.as_claimed(claim(store))
    assert left and not left.train and [task.name for task, _ in left.tasks] == ["piqa"]
    scored = Claim(key=KEY, holder="a", fence=9, attempt=9, published=True, scored=frozenset(k for _, k in item.tasks))
    assert item.as_claimed(scored) is None


def test_blobs_travel_through_any_fsspec_url(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Store(blobs="memory://bucket/cells")
    taken = claim(here)
    (here.folder(taken) / "checkpoints").mkdir()
    (here.folder(taken) / "checkpoints" / "big").write_text("optimiser")
    (here.folder(taken) / "scores").mkdir()
    (here.folder(taken) / "scores" / "mmlu.json").write_text("[]")
    here.publish(taken, CELL, {})
    here.finish(taken)
    monkeypatch.setenv("GOLINEAR_HOME", str(home / "another machine"))
    elsewhere = Store(here.url, blobs="memory://bucket/cells")
    folder = elsewhere.published_folder(KEY)
    assert str(folder).startswith(str(home / "another machine"))
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] == ["scores/mmlu.json"]
    queries.forget(elsewhere, KEY)
    with pytest.raises(KeyError):
        elsewhere.published_folder(KEY)
    with pytest.raises(ValueError, match="key/attempt"):
        elsewhere.blobs.folder("../../etc/1")
    with pytest.raises(FileNotFoundError, match="not at memory"):
        elsewhere.blobs.fetch(f"{KEY}/77")


def test_another_node_goes_on_from_the_checkpoint_at_the_url(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(folder: Path, step: int) -> None:
        made = folder / "checkpoints" / f"step-{step:08d}"
        made.mkdir(parents=True)
        (made / "state.safetensors").write_bytes(b"x" * step)
        (made / "state.json").write_text(json.dumps({"tokens_seen": 64 * step}))
        (folder / "curve.jsonl").write_text("{}" * step)

    here = Store(blobs="memory://nodes/cells")
    taken = claim(here)
    with mirrored(here.blobs, taken.blob) as mirror:
        assert mirror
        save(here.folder(taken), 3)
        mirror.update()
        assert mirror.tokens == 192
        save(here.folder(taken), 7)
    assert mirror.tokens == 448, "the last one too, however training ended"
    here.fail(taken, "preempted", "the node went")
    monkeypatch.setenv("GOLINEAR_HOME", str(home / "another node"))
    elsewhere = Store(here.url, blobs="memory://nodes/cells")
    again = claim(elsewhere)
    assert not elsewhere.blobs.fetch_checkpoint(again.blob, newer_than="step-00000007")
    assert elsewhere.blobs.fetch_checkpoint(again.blob, newer_than="step-00000003")
    folder = elsewhere.folder(again)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000007"], "older ones are gone"
    assert (folder / "checkpoints" / "step-00000007" / "state.safetensors").read_bytes() == b"x" * 7
    assert (folder / "curve.jsonl").read_text() == "{}" * 7
    elsewhere.publish(again, CELL, {})
    elsewhere.blobs.drop_checkpoints(KEY)
    third = claim_of(elsewhere, again)
    assert not elsewhere.blobs.fetch_checkpoint(third), "published: no checkpoint is kept"


def claim_of(store: Store, held: Claim) -> str:
    store.finish(held)
    return claim(store).blob
