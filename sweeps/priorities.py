"""What goes first: priorities of sweeps and cells, and room that a sweep makes for a more urgent one. Imports no torch.

Within a flow cells are taken by priority. Flows that share a Ray cluster: one that finds no place for a worker says so
here, and those of lower priority end a worker after its cell instead of taking the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from sweeps import schema

if TYPE_CHECKING:
    from sweeps.store import Store

WAITING_SECONDS = 15.0  # until a sweep that was waiting and says nothing more is taken for dead


def put(store: Store, key: str, priority: float) -> None:
    """Give a sweep (its id) or a cell (its key) a priority; 0 is everyone's."""
    table = schema.priorities
    with store.engine.begin() as connection:
        connection.execute(sa.delete(table).where(table.c.key == key))
        if priority:
            connection.execute(sa.insert(table).values(key=key, priority=priority))


def get(store: Store) -> dict[str, float]:
    """All priorities that are not 0, by sweep id or cell key."""
    return {row.key: row.priority for row in store.read(sa.select(schema.priorities))}


def ask_for_room(store: Store, holder: str, priority: float) -> None:
    """Say that a worker of this holder finds no place; good for some seconds."""
    table = schema.waiting
    with store.engine.begin() as connection:
        connection.execute(sa.delete(table).where(sa.or_(table.c.holder == holder, table.c.expires_at < store.now)))
        row = {"holder": holder, "priority": priority, "expires_at": store.now + WAITING_SECONDS}
        connection.execute(sa.insert(table).values(row))


def stop_asking(store: Store, holder: str) -> None:
    """The worker has its place."""
    with store.engine.begin() as connection:
        connection.execute(sa.delete(schema.waiting).where(schema.waiting.c.holder == holder))


def outranked(store: Store, priority: float) -> bool:
    """Whether a sweep of higher priority waits for a place."""
    table = schema.waiting.c
    query = sa.select(table.holder).where(table.priority > priority, table.expires_at > store.now).limit(1)
    return bool(store.read(query))
