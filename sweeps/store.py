"""What is done and who is at work: claims, attempts and published results in one SQL database. Imports no torch.

Exactly-once effect from at-least-once execution. A claim is a row with a fence that only grows; it is taken, taken over
and renewed by one conditional statement on the database's clock. An attempt writes its own folder; publishing is one
transaction that checks the fence. Only what is published is a result.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from linear_core.evaluate.scores import Score
from sweeps import items, schema
from sweeps.blobs import Blobs
from sweeps.cell import Cell
from sweeps.home import database_url

EXPIRES_AFTER = 60.0  # seconds without renewal until another may take a claim over; GOLINEAR_CLAIM_SECONDS changes it


class ClaimLost(RuntimeError):
    """The claim is held by someone else or has expired: stop, and publish nothing."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The right to work on a cell until it expires, and the attempt that works.

    ``published`` and ``scored`` are true as of the claim: what a plan made earlier still wanted may be done by now.
    """

    key: str
    holder: str
    fence: int
    attempt: int
    published: bool = False
    scored: frozenset[str] = frozenset()  # score keys that have a value

    @property
    def blob(self) -> str:
        return f"{self.key}/{self.attempt}"


def new_holder() -> str:
    """A name for this process as claim holder: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Store:
    """Claims, attempts, results and scores.

    ``expires_after``: seconds without renewal until a claim may be taken over. ``clock`` replaces the database's clock
    in simulations. Raises ValueError for a database that is not supported or a claim that would live under a second.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        blobs: str | None = None,
        expires_after: float | None = None,
        clock: Callable[[], float] | None = None,
    ):
        self.url = url or database_url()
        self.expires_after = _claim_seconds() if expires_after is None else expires_after
        self.engine = schema.open_engine(self.url)
        self.blobs = Blobs(blobs)
        self._clock = clock

    @property
    def now(self) -> sa.ColumnElement[float]:
        if self._clock is not None:
            return sa.literal(self._clock(), sa.Float)
        return schema.now(self.engine.dialect.name)

    @property
    def name(self) -> str:
        """What tells this store's records apart where several stores share an MLflow server."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def close(self) -> None:
        self.engine.dispose()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "blobs": self.blobs.url, "expires_after": self.expires_after}  # its addresses

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], blobs=state["blobs"], expires_after=state["expires_after"])  # type: ignore[misc]

    # claims and attempts

    def claim(self, key: str, holder: str) -> Claim | None:
        """Take a free, released or expired claim and open an attempt; None when someone else holds it.

        Attempts of the key that were still running belong to a dead holder: they become ``lost``.
        """
        table = schema.claims
        insert = (sqlite if self.engine.dialect.name == "sqlite" else postgresql).insert(table)
        take = insert.values(key=key, holder=holder, fence=1, expires_at=self.now + self.expires_after)
        take = take.on_conflict_do_update(
            index_elements=[table.c.key],
            set_={"holder": holder, "fence": table.c.fence + 1, "expires_at": self.now + self.expires_after},
            where=table.c.expires_at <= self.now,
        )
        with self.engine.begin() as connection:
            fence = connection.execute(take.returning(table.c.fence)).scalar()
            if fence is None:
                return None
            connection.execute(
                sa.update(schema.attempts)
                .where(schema.attempts.c.key == key, schema.attempts.c.state == "running")
                .values(
                    state="lost", cause="preempted", reason="its claim expired and was taken over", ended_at=self.now
                )
            )
            row = {"key": key, "fence": fence, "holder": holder, "state": "running", "started_at": self.now}
            attempt = connection.execute(
                sa.insert(schema.attempts).values(row).returning(schema.attempts.c.id)
            ).scalar_one()
            results, scores = schema.results.c, schema.scores.c
            published = connection.execute(sa.select(results.key).where(results.key == key)).first() is not None
            scored = connection.execute(
                sa.select(scores.score_key).where(scores.key == key, scores.value.is_not(None)).distinct()
            ).scalars()
            return Claim(
                key=key, holder=holder, fence=fence, attempt=attempt, published=published, scored=frozenset(scored)
            )

    def renew(self, claim: Claim) -> None:
        """Keep a claim for another ``expires_after`` seconds. Raises ClaimLost when it is gone."""
        with self.engine.begin() as connection:
            self._check(connection, claim)

    def _check(self, connection: sa.Connection, claim: Claim, *, release: bool = False) -> None:
        """The fence check of every write: one conditional UPDATE, which also renews or releases."""
        table = schema.claims
        mine = sa.and_(table.c.key == claim.key, table.c.holder == claim.holder, table.c.fence == claim.fence)
        expires = sa.literal(0.0) if release else self.now + self.expires_after
        done = connection.execute(
            sa.update(table).where(mine, table.c.expires_at > self.now).values(expires_at=expires)
        )
        if done.rowcount != 1:
            raise ClaimLost(f"claim on {claim.key} (fence {claim.fence}) is lost: it expired or was taken over")

    def holds(self, claim: Claim) -> bool:
        """Whether a claim is still ours; renews nothing."""
        table = schema.claims.c
        mine = sa.and_(table.key == claim.key, table.holder == claim.holder, table.fence == claim.fence)
        return bool(self.read(sa.select(table.key).where(mine, table.expires_at > self.now)))

    def note(self, claim: Claim, *, tokens: int | None = None, tracking_run: str | None = None) -> None:
        """Record how far the newest checkpoint is, or the attempt's MLflow run; renews. Raises ClaimLost."""
        values = {k: v for k, v in {"tokens": tokens, "tracking_run": tracking_run}.items() if v is not None}
        with self.engine.begin() as connection:
            self._check(connection, claim)
            connection.execute(sa.update(schema.attempts).where(schema.attempts.c.id == claim.attempt).values(values))

    def publish(self, claim: Claim, cell: Cell, provenance: dict[str, Any]) -> None:
        """Make this attempt the result of its cell: upload its files, then one transaction that checks the fence.

        Raises ClaimLost when the claim is gone (nothing is published), ValueError when the cell is not the claim's or
        the key is already published from other inputs.
        """
        if cell.train_key != claim.key:
            raise ValueError(f"claim is on {claim.key}, but the cell is {cell.train_key}")
        blob = self.blobs.put(claim.blob)
        with self.engine.begin() as connection:
            self._check(connection, claim)
            stored = connection.execute(
                sa.select(schema.results.c.inputs).where(schema.results.c.key == claim.key)
            ).scalar()
            if stored is not None:
                _same_inputs(claim.key, stored, cell.inputs)
                return
            row = {"key": claim.key, "attempt": claim.attempt, "inputs": cell.inputs, "blob": blob}
            connection.execute(
                sa.insert(schema.results).values({**row, "published_at": self.now, "provenance": provenance})
            )

    def put_scores(self, claim: Claim, score_key: str, found: Iterable[Score]) -> None:
        """Store one task's scores, the moment it ends. A value that is there stays; a missing one is replaced.

        Raises ClaimLost as ``publish`` does.
        """
        table = schema.scores
        with self.engine.begin() as connection:
            self._check(connection, claim)
            connection.execute(sa.delete(table).where(table.c.score_key == score_key, table.c.value.is_(None)))
            kept = set(connection.execute(sa.select(table.c.metric).where(table.c.score_key == score_key)).scalars())
            for score in found:
                if score.metric not in kept:
                    small = {**score.to_dict(), "details": items.kept(score)}
                    row = {"score_key": score_key, "metric": score.metric, "key": claim.key, "value": score.value}
                    connection.execute(sa.insert(table).values({**row, "score": small, "stored_at": self.now}))

    def finish(self, claim: Claim) -> None:
        """The attempt is done; its claim is free. Raises ClaimLost when it was not ours any more."""
        self._end(claim, state="done")

    def fail(
        self, claim: Claim, cause: str, reason: str, *, traceback: str = "", log_tail: str = "", counted: bool = True
    ) -> None:
        """Record why an attempt failed and free its claim. Raises ClaimLost when it was not ours any more."""
        state = cause if cause in ("cancelled", "pruned") else "failed"
        texts = {"reason": reason[:2000], "traceback": traceback[-20000:], "log_tail": log_tail[-20000:]}
        self._end(claim, state=state, cause=cause, counted=counted, **texts)

    def _end(self, claim: Claim, **values: Any) -> None:
        with self.engine.begin() as connection:
            self._check(connection, claim, release=True)
            connection.execute(
                sa.update(schema.attempts)
                .where(schema.attempts.c.id == claim.attempt)
                .values(**values, folder=claim.blob, ended_at=self.now)
            )

    # reading

    def read(self, statement: sa.Executable) -> list[Any]:
        """Rows of a SELECT, without taking the write lock."""
        with self.engine.connect().execution_options(read_only=True) as connection:
            return list(connection.execute(statement).all())

    def folder(self, claim: Claim) -> Path:
        """The attempt's own folder on this machine."""
        return self.blobs.folder(claim.blob)

    def published_folder(self, key: str) -> Path:
        """A published cell's files on this machine, fetched when needed. Raises KeyError when it is not published."""
        blob = self.read(sa.select(schema.results.c.blob).where(schema.results.c.key == key))
        if not blob:
            raise KeyError(f"{key} is not published")
        return self.blobs.fetch(blob[0].blob)


def _claim_seconds() -> float:
    text = os.environ.get("GOLINEAR_CLAIM_SECONDS") or str(EXPIRES_AFTER)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise ValueError(f"GOLINEAR_CLAIM_SECONDS must be between 1 and 86400, not {text!r}")
    return seconds


def _same_inputs(key: str, stored: dict[str, Any], mine: dict[str, Any]) -> None:
    from sweeps.cell import canonical

    if canonical(stored) != canonical(mine):
        raise ValueError(f"{key} is published from other inputs than this cell's: {stored!r}, not {mine!r}")
