"""golinear cancel, pause, drain, resume and gc, as typed."""

from __future__ import annotations

import pytest
from sweep_helpers import pinned
from typer.testing import CliRunner

from sweeps import queries
from sweeps.cli import app
from sweeps.grids import ablation
from sweeps.store import ClaimLost, Store

SWEEP = pinned(ablation("smollm2-135m", "gdn"))
KEY = SWEEP.cells[1].train_key


def golinear(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_sweep_is_paused_drained_cancelled_and_gone_on_with(store: Store) -> None:
    queries.save_sweep(store, "run-1", SWEEP)
    for command, state in (("pause", "paused"), ("resume", "running"), ("drain", "draining"), ("cancel", "cancelled")):
        golinear(command, "ablation")
        assert queries.sweep_state(store, "run-1") == state
    with pytest.raises(ValueError, match="not in the store"):
        golinear("pause", "nonsense")


def test_one_cell_is_cancelled(store: Store) -> None:
    at_work = store.claim(KEY, "a")
    assert at_work and "stops within seconds" in golinear("cancel", KEY[-16:])
    with pytest.raises(ClaimLost):
        store.renew(at_work)


def test_gc_says_what_would_go_and_then_it_goes(store: Store) -> None:
    taken = store.claim(KEY, "a")
    assert taken
    (store.folder(taken) / "checkpoints").mkdir()
    (store.folder(taken) / "checkpoints" / "state").write_bytes(b"x" * 2**20)
    store.publish(taken, SWEEP.cells[1], {})
    store.finish(taken)
    said = golinear("gc", "--dry-run")
    assert "checkpoints of a finished cell" in said and "1.0 MiB  in all, would be freed" in said
    assert "freed" in golinear("gc") and "0.0 MiB  in all" in golinear("gc")
    assert store.folder(taken).exists() and not (store.folder(taken) / "checkpoints").exists()
