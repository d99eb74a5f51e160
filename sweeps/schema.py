"""The tables of the store and its engine: SQLite (WAL) on one machine, Postgres on a cluster. Imports no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()
JSON = sa.JSON(none_as_null=True)

# One row per cell that was ever claimed. The fence only grows; an expired or released claim keeps its row.
claims = sa.Table(
    "claims",
    metadata,
    sa.Column("key", sa.String(160), primary_key=True),
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)
# Every try at a cell. state: running, done, failed, lost (its claim was taken over), cancelled, pruned, forgotten.
attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("key", sa.String(160), nullable=False, index=True),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("holder", sa.String(200), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("folder", sa.Text, nullable=False, default=""),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("tokens", sa.Integer, nullable=False, default=0),  # in its newest checkpoint
    sa.Column("cause", sa.String(16), nullable=False, default=""),
    sa.Column(
        "counted", sa.Boolean, nullable=False, default=True
    ),  # towards the bound of its cause; False after a retry
    sa.Column("reason", sa.Text, nullable=False, default=""),
    sa.Column("traceback", sa.Text, nullable=False, default=""),
    sa.Column("log_tail", sa.Text, nullable=False, default=""),
    sa.Column(
        "tracking_run", sa.String(64), nullable=False, default=""
    ),  # MLflow's id, to end it when the attempt is lost
)
# The result of a cell's training: at most one a key, and only this is a result.
results = sa.Table(
    "results",
    metadata,
    sa.Column("key", sa.String(160), primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("inputs", JSON, nullable=False),
    sa.Column("blob", sa.Text, nullable=False),
    sa.Column("published_at", sa.Float, nullable=False),
    sa.Column("provenance", JSON, nullable=False),
)
# One row per metric of a task, stored the moment the task ends. value is NULL with a reason, never 0 for missing.
scores = sa.Table(
    "scores",
    metadata,
    sa.Column("score_key", sa.String(160), primary_key=True),
    sa.Column("metric", sa.String(80), primary_key=True),
    sa.Column("key", sa.String(160), nullable=False, index=True),
    sa.Column("value", sa.Float),
    sa.Column("score", JSON, nullable=False),
    sa.Column("stored_at", sa.Float, nullable=False),
)
# Which cells a sweep asked for, so that status and tables need nothing but the store.
sweeps = sa.Table(
    "sweeps",
    metadata,
    sa.Column("id", sa.String(80), primary_key=True),
    sa.Column("name", sa.String(80), nullable=False),
    sa.Column("spec", JSON, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # as in queries.set_sweep_state
)
# What a person put before or behind the rest: a sweep's id or a cell's key. 0 unless named here; higher goes first.
priorities = sa.Table(
    "priorities",
    metadata,
    sa.Column("key", sa.String(160), primary_key=True),
    sa.Column("priority", sa.Float, nullable=False),
)
# Flows that are alive (sweeps.flow_runs): one that dies leaves its row to expire.
flow_runs = sa.Table(
    "flow_runs",
    metadata,
    sa.Column("id", sa.String(80), primary_key=True),
    sa.Column("sweep_id", sa.String(80), nullable=False),
    sa.Column("tracking_run", sa.String(64), nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)
# Sweeps that wait for a place in Ray: those of lower priority make room at their next cell.
waiting = sa.Table(
    "waiting",
    metadata,
    sa.Column("holder", sa.String(200), primary_key=True),
    sa.Column("priority", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)
# Small measured facts that plans use: tokens/s of a recipe on a device, bytes of a probe step.
measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("stored_at", sa.Float, nullable=False),
)
# Which revisions of which new base models a deployment was started for (flows/new_models.py): once each.
started = sa.Table(
    "started",
    metadata,
    sa.Column("model", sa.String(300), primary_key=True),
    sa.Column("revision", sa.String(64), primary_key=True),
    sa.Column("deployment", sa.String(200), primary_key=True),
    sa.Column("flow_run", sa.String(64), nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
)


def open_engine(url: str) -> sa.Engine:
    """An engine with the tables made. Raises ValueError for a database that is neither SQLite nor Postgres."""
    parsed = sa.make_url(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError("the store needs a file that all processes see, not an SQLite database in memory")
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(parsed, connect_args={"timeout": 60})
        sa.event.listen(engine, "connect", _sqlite_connect)
        sa.event.listen(engine, "begin", _sqlite_begin)
    elif backend == "postgresql":
        engine = sa.create_engine(parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
    else:
        shown = parsed.render_as_string(hide_password=True)
        raise ValueError(f"database {shown!r} is not supported; allowed: sqlite:////path/store.db, postgresql://…")
    _create(engine)
    return engine


def _sqlite_connect(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _sqlite_begin, at once for writing
    connection.execute("PRAGMA busy_timeout=60000")
    for wait in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, None):  # turning WAL on does not wait for other processes by itself
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except Exception as error:
            if wait is None or "locked" not in str(error):
                raise
            time.sleep(wait)
    connection.execute("PRAGMA synchronous=NORMAL")  # safe when a process dies; a power cut may cost the last commits


def _sqlite_begin(connection: sa.Connection) -> None:
    if not connection.get_execution_options().get("read_only"):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _create(engine: sa.Engine) -> None:
    """Makes the tables once, whoever else starts at the same moment."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7069, 1)"))
        metadata.create_all(connection)


def now(dialect: str) -> sa.ColumnElement[float]:
    """Seconds since 1970 by the database's own clock."""
    if dialect == "sqlite":
        return sa.literal_column("(julianday('now') - 2440587.5) * 86400.0", sa.Float)
    return sa.literal_column("extract(epoch from clock_timestamp())", sa.Float)
