"""Which flows are alive: a row each, renewed while it runs, by the database's clock. Imports no torch.

A flow that dies without a word (SIGKILL, power) leaves its row to expire. Whoever comes next buries it: its sweep is not
``running`` any more, and its records in MLflow and Prefect can be ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from sweeps import schema
from sweeps.store import Store

log = logging.getLogger(__name__)
ACTIVE = ("running", "paused", "draining")  # states of a sweep that say that a flow is at work on it


@dataclass(frozen=True, kw_only=True)
class FlowRun:
    """One run of a flow. ``id``: Prefect's. ``tracking_run``: its sweep's MLflow run."""

    id: str
    sweep_id: str
    tracking_run: str


@contextmanager
def alive(store: Store, run: FlowRun) -> Iterator[None]:
    """Say that this flow runs, until the block ends."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(store.expires_after / 3):
            try:
                _say(store, run)
            except OperationalError as error:
                log.warning("the flow's row could not be renewed yet: %s", error)

    _say(store, run)
    thread = threading.Thread(target=renew, name="flow alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with store.engine.begin() as connection:
            connection.execute(sa.delete(schema.flow_runs).where(schema.flow_runs.c.id == run.id))


def _say(store: Store, run: FlowRun) -> None:
    table = schema.flow_runs
    expires = store.now + store.expires_after
    with store.engine.begin() as connection:
        renewed = connection.execute(sa.update(table).where(table.c.id == run.id).values(expires_at=expires))
        if renewed.rowcount != 1:  # new, or buried while the machine slept
            row = {"id": run.id, "sweep_id": run.sweep_id, "tracking_run": run.tracking_run, "expires_at": expires}
            connection.execute(sa.insert(table).values(row))


def live_sweeps(store: Store) -> set[str]:
    """Ids of the sweeps that a living flow is at work on."""
    table = schema.flow_runs.c
    return {row.sweep_id for row in store.read(sa.select(table.sweep_id).where(table.expires_at > store.now))}


def bury(store: Store) -> list[FlowRun]:
    """Take out the flows that died; a sweep of theirs that nobody else is at work on becomes ``failed``.

    Returns them; ``tracking_run`` is "" where another flow goes on with the same MLflow run.
    """
    flows, sweeps = schema.flow_runs, schema.sweeps
    with store.engine.begin() as connection:
        dead = connection.execute(sa.select(flows).where(flows.c.expires_at <= store.now)).all()
        if not dead:
            return []
        connection.execute(sa.delete(flows).where(flows.c.id.in_([row.id for row in dead])))
        live = set(connection.execute(sa.select(flows.c.sweep_id)).scalars())
        left = [row.sweep_id for row in dead if row.sweep_id not in live]
        ended = sa.update(sweeps).where(sweeps.c.id.in_(left), sweeps.c.state.in_(ACTIVE)).values(state="failed")
        connection.execute(ended)
    return [
        FlowRun(id=row.id, sweep_id=row.sweep_id, tracking_run=row.tracking_run if row.sweep_id in left else "")
        for row in dead
    ]
