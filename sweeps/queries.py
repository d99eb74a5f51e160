"""Reading and housekeeping of the store: overview, scores, failures, forget, retry, sweeps. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from linear_core.evaluate.scores import Score
from sweeps import schema

if TYPE_CHECKING:
    from sweeps.store import Store
    from sweeps.sweep import Sweep


@dataclass(kw_only=True)
class CellState:
    """All that the store knows about one key, for plans and status."""

    published: bool = False
    holder: str = ""  # of a live claim
    expires_in: float = 0.0  # seconds until that claim may be taken over
    resume_tokens: int = 0  # in the newest checkpoint of its attempts
    failures: Counter[str] = field(
        default_factory=Counter
    )  # counted attempts by cause, since the last retry or success
    last_state: str = ""  # of the newest attempt
    last_cause: str = ""
    last_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed or lost attempt with what is known about it."""

    key: str
    attempt: int
    state: str
    cause: str
    reason: str
    traceback: str
    log_tail: str
    holder: str
    ended_at: float


@dataclass(kw_only=True)
class Snapshot:
    """What the store knows at one moment: state by key, score keys that have a value, measured facts by name."""

    states: dict[str, CellState] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)
    measured: dict[str, float] = field(default_factory=dict)


def overview(store: Store) -> tuple[dict[str, CellState], set[str]]:
    """State of every key, and the score keys that have a value."""
    found = snapshot(store)
    return found.states, found.scored


def snapshot(store: Store) -> Snapshot:
    """Everything that a plan needs, in one query for any number of cells."""
    claims, attempts, results, scores = schema.claims.c, schema.attempts.c, schema.results.c, schema.scores.c
    facts = schema.measurements.c
    text, zero = sa.literal("", sa.Text), sa.literal(0, sa.Integer)
    statement = sa.union_all(  # kind, key, holder or state, cause, reason, seconds, tokens, counted, order
        sa.select(
            sa.literal("result", sa.Text), results.key, text, text, text, sa.literal(0.0), zero, zero, zero.label("n")
        ),
        sa.select(
            sa.literal("score", sa.Text), scores.score_key, text, text, text, sa.literal(0.0), zero, zero, zero
        ).where(scores.value.is_not(None)),
        sa.select(
            sa.literal("claim", sa.Text), claims.key, claims.holder, text, text, claims.expires_at - store.now,
            zero, zero, zero,
        ).where(claims.expires_at > store.now),
        sa.select(
            sa.literal("attempt", sa.Text), attempts.key, attempts.state, attempts.cause, attempts.reason,
            sa.literal(0.0), attempts.tokens, sa.cast(attempts.counted, sa.Integer), attempts.id,
        ),
        sa.select(
            sa.literal("measured", sa.Text), facts.name, text, text, text, facts.value, zero, zero, zero
        ),
    ).order_by("n")  # fmt: skip
    found = Snapshot()
    for kind, key, a, cause, reason, seconds, tokens, counted, _ in store.read(statement):
        if kind == "score":
            found.scored.add(key)
            continue
        if kind == "measured":
            found.measured[key] = seconds
            continue
        state = found.states.setdefault(key, CellState())
        if kind == "result":
            state.published = True
        elif kind == "claim":
            state.holder, state.expires_in = a, seconds
        else:
            _add_attempt(state, a, cause, reason, tokens, bool(counted))
    return found


def attempts_at(store: Store, key: str) -> CellState:
    """What the attempts at one cell amount to (its ``published`` and ``holder`` are not looked up)."""
    table = schema.attempts.c
    columns = (table.state, table.cause, table.reason, table.tokens, table.counted)
    state = CellState()
    for row in store.read(sa.select(*columns).where(table.key == key).order_by(table.id)):
        _add_attempt(state, row.state, row.cause, row.reason, row.tokens, bool(row.counted))
    return state


def _add_attempt(state: CellState, name: str, cause: str, reason: str, tokens: int, counted: bool) -> None:
    state.last_state, state.last_cause, state.last_reason = name, cause, reason
    if name == "forgotten":
        return
    state.resume_tokens = max(state.resume_tokens, tokens)
    if name == "done":
        state.failures.clear()
    elif name in ("failed", "lost", "cancelled", "pruned") and counted:
        state.failures[cause] += 1


def scores_of(store: Store, keys: Sequence[str] | None = None) -> list[tuple[str, str, Score]]:
    """(train_key, score_key, Score) for these cells, or for all; in the order they were stored. Details: ``items.kept``."""
    table = schema.scores.c
    rows = store.read(
        sa.select(table.key, table.score_key, table.score).order_by(table.stored_at, table.score_key, table.metric)
    )
    wanted = None if keys is None else set(keys)
    return [
        (row.key, row.score_key, Score.from_dict({"details": {}, **row.score}))
        for row in rows
        if wanted is None or row.key in wanted
    ]


def provenance_of(store: Store) -> dict[str, dict[str, Any]]:
    """Provenance of every published cell by key, with the published folder's name as ``blob``."""
    table = schema.results.c
    rows = store.read(sa.select(table.key, table.blob, table.provenance, table.published_at))
    return {row.key: {**row.provenance, "blob": row.blob, "published_at": row.published_at} for row in rows}


def failures(store: Store, key: str | None = None) -> list[Failure]:
    """Failed, lost, cancelled and pruned attempts, newest first: of one key (a prefix is enough), or the newest of every key that has no
    later success."""
    table = schema.attempts
    query = sa.select(table).where(table.c.state != "forgotten").order_by(table.c.id.desc())
    if key is not None:
        query = query.where(table.c.key.startswith(key, autoescape=True))
    found: list[Failure] = []
    seen: set[str] = set()
    for row in store.read(query):
        if key is None and row.key in seen:
            continue
        seen.add(row.key)
        if row.state in ("failed", "lost", "cancelled", "pruned"):
            fields = {name: getattr(row, name) for name in Failure.__dataclass_fields__ if name != "attempt"}
            found.append(Failure(attempt=row.id, **{**fields, "ended_at": row.ended_at or 0.0}))
    return found


def tracked_runs(store: Store, keys: Sequence[str]) -> list[str]:
    """The MLflow run of each of these cells' newest finished attempt, in the order of the keys."""
    attempts = schema.attempts.c
    query = sa.select(attempts.key, attempts.tracking_run).where(attempts.state == "done").order_by(attempts.id)
    runs = {row.key: row.tracking_run for row in store.read(query)}
    return [runs[key] for key in keys if runs.get(key)]


def live_runs(store: Store) -> list[str]:
    """MLflow runs of attempts whose claim is alive: every other cell run that says RUNNING is an orphan."""
    attempts, claims = schema.attempts.c, schema.claims.c
    query = sa.select(attempts.tracking_run).where(
        attempts.state == "running",
        claims.key == attempts.key,
        claims.fence == attempts.fence,
        claims.expires_at > store.now,
    )
    return [row.tracking_run for row in store.read(query) if row.tracking_run]


def find_key(store: Store, text: str, *, planned: bool = False) -> str:
    """The one key that starts with ``text`` or ends with it (its 16 hex do), of cells that ran; ``planned``: or are to.

    Raises ValueError for none or several.
    """
    keys = {
        row.key for table in (schema.results, schema.attempts) for row in store.read(sa.select(table.c.key).distinct())
    }
    if planned:
        sweeps = (load_sweep(store, entry["id"])[1] for entry in list_sweeps(store))
        keys |= {cell.train_key for sweep in sweeps for cell in sweep.cells}
    found = [text] if text in keys else sorted(k for k in keys if k.startswith(text) or k.endswith(text))
    if len(found) != 1:
        listed = ", ".join(found[:5]) or "none"
        raise ValueError(
            f"cell {text!r} names {len(found)} cells ({listed}); give a key of golinear status, or its last 16"
        )
    return found[0]


def forget(store: Store, key: str) -> int:
    """Drop a cell's result, scores and attempts, and their files, so that it alone runs again; returns files' attempts.

    Raises ValueError when the key is not known, or is being worked on (with the holder's name).
    """
    with store.engine.begin() as connection:
        claim = schema.claims.c
        holder = connection.execute(
            sa.select(claim.holder).where(claim.key == key, claim.expires_at > store.now)
        ).scalar()
        if holder is not None:
            raise ValueError(f"{key} is being worked on by {holder}; cancel it first")
        ids = list(connection.execute(sa.select(schema.attempts.c.id).where(schema.attempts.c.key == key)).scalars())
        if not ids:
            raise ValueError(f"{key} is not in the store; golinear status lists what is")
        connection.execute(sa.delete(schema.results).where(schema.results.c.key == key))
        connection.execute(sa.delete(schema.scores).where(schema.scores.c.key == key))
        connection.execute(
            sa.update(schema.attempts).where(schema.attempts.c.key == key).values(state="forgotten", counted=False)
        )
    for attempt in ids:
        store.blobs.delete(f"{key}/{attempt}")
    return len(ids)


def cancel(store: Store, key: str, by: str) -> bool:
    """Take a cell from whoever works on it: their claim is lost at once, their stage stops within the claim's renewal.

    It does not run again until ``retry``. True when somebody was at work. Raises ValueError for an unknown key.
    """
    claims, attempts = schema.claims, schema.attempts
    with store.engine.begin() as connection:
        if connection.execute(sa.select(claims.c.key).where(claims.c.key == key)).first() is None:
            raise ValueError(f"{key} was never started; golinear status lists what was")
        live = sa.update(claims).where(claims.c.key == key, claims.c.expires_at > store.now)
        running = connection.execute(live.values(fence=claims.c.fence + 1, expires_at=0.0)).rowcount == 1
        ended = {"state": "cancelled", "cause": "cancelled", "reason": f"cancelled by {by}", "ended_at": store.now}
        newest = sa.select(sa.func.max(attempts.c.id)).where(attempts.c.key == key).scalar_subquery()
        connection.execute(
            sa.update(attempts).where(attempts.c.id == newest, attempts.c.state != "done").values(ended)
        )
    return running


def retry(store: Store, keys: Sequence[str] | None = None) -> int:
    """Let failed cells run again: their failures stop counting. Returns the number of attempts set aside."""
    table = schema.attempts
    change = (
        sa.update(table)
        .where(table.c.state.in_(("failed", "lost", "cancelled", "pruned")), table.c.counted)
        .values(counted=False)
    )
    if keys is not None:
        change = change.where(table.c.key.in_(list(keys)))
    with store.engine.begin() as connection:
        return connection.execute(change).rowcount


def save_sweep(store: Store, sweep_id: str, sweep: Sweep, state: str = "running") -> None:
    """Remember what a sweep asked for, so that status, tables and reports need only the store. Again: replaced."""
    table = schema.sweeps
    with store.engine.begin() as connection:
        connection.execute(sa.delete(table).where(table.c.id == sweep_id))
        row = {"id": sweep_id, "name": sweep.name, "spec": sweep.to_dict(), "state": state, "created_at": store.now}
        connection.execute(sa.insert(table).values(row))


def set_sweep_state(store: Store, sweep_id: str, state: str) -> None:
    """running, paused, draining, cancelled, completed or failed. Raises ValueError for an unknown sweep or state."""
    allowed = ("running", "paused", "draining", "cancelled", "completed", "failed")
    if state not in allowed:
        raise ValueError(f"sweep state {state!r} is not known; allowed: {', '.join(allowed)}")
    table = schema.sweeps
    with store.engine.begin() as connection:
        if connection.execute(sa.update(table).where(table.c.id == sweep_id).values(state=state)).rowcount != 1:
            raise ValueError(f"sweep {sweep_id!r} is not in the store; golinear status lists what is")


def sweep_state(store: Store, sweep_id: str) -> str:
    """Its state, "" when it is not in the store. Asked between cells: paused, draining and cancelled start no more."""
    rows = store.read(sa.select(schema.sweeps.c.state).where(schema.sweeps.c.id == sweep_id))
    return rows[0].state if rows else ""


def load_sweep(store: Store, sweep_id: str | None = None) -> tuple[str, Sweep]:
    """(id, sweep): by id, by name (its newest), or the newest of all. Raises ValueError when there is none."""
    from sweeps.sweep import Sweep

    table = schema.sweeps.c
    query = sa.select(table.id, table.spec).order_by(table.created_at.desc()).limit(1)
    if sweep_id is not None:
        query = query.where(sa.or_(table.id == sweep_id, table.name == sweep_id))
    rows = store.read(query)
    if not rows:
        raise ValueError("no sweep has run yet" if sweep_id is None else f"sweep {sweep_id!r} is not in the store")
    return rows[0].id, Sweep.from_dict(rows[0].spec)


def list_sweeps(store: Store) -> list[dict[str, Any]]:
    """id, name, state and creation time of every sweep, newest first."""
    table = schema.sweeps.c
    rows = store.read(sa.select(table.id, table.name, table.state, table.created_at).order_by(table.created_at.desc()))
    return [dict(row._mapping) for row in rows]


def measure(store: Store, name: str, value: float) -> None:
    """Keep a measured fact for later plans, e.g. ``tokens_per_second/NVIDIA H200/llama3.1-8b/gdn/4096``."""
    table = schema.measurements
    with store.engine.begin() as connection:
        connection.execute(sa.delete(table).where(table.c.name == name))
        connection.execute(sa.insert(table).values(name=name, value=value, stored_at=store.now))


def measurements(store: Store) -> dict[str, float]:
    return {
        row.name: row.value for row in store.read(sa.select(schema.measurements.c.name, schema.measurements.c.value))
    }


def started_models(store: Store, deployment: str) -> set[tuple[str, str]]:
    """(model, revision) of every new base model that this deployment was started for."""
    table = schema.started.c
    return {(row.model, row.revision) for row in store.read(sa.select(table.model, table.revision).where(table.deployment == deployment))}


def note_started(store: Store, deployment: str, model: str, revision: str, flow_run: str) -> None:
    """Remember it; noted before: replaced."""
    table = schema.started
    same = (table.c.model == model, table.c.revision == revision, table.c.deployment == deployment)
    with store.engine.begin() as connection:
        connection.execute(sa.delete(table).where(*same))
        row = {"model": model, "revision": revision, "deployment": deployment, "flow_run": flow_run}
        connection.execute(sa.insert(table).values(**row, started_at=store.now))
