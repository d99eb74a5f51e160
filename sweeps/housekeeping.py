"""What a store keeps on disk without need, and its removal. Results, scores and logs are never touched. No torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from sweeps import schema
from sweeps.blobs import SAFE
from sweeps.store import Store


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A folder that nothing needs any more."""

    path: Path
    num_bytes: int
    why: str


def leftovers(store: Store) -> list[Leftover]:
    """Checkpoints (optimiser state) of finished cells, and folders of attempts that did not become a result.

    Attempts of a cell that is not published yet are kept: the next attempt goes on from their checkpoints. So is whatever
    belongs to a live claim, and every folder that the store does not know.
    """
    attempts, results, claims = schema.attempts.c, schema.results.c, schema.claims.c
    published = {row.key: row.blob for row in store.read(sa.select(results.key, results.blob))}
    busy = {row.key for row in store.read(sa.select(claims.key).where(claims.expires_at > store.now))}
    found = []
    for row in store.read(sa.select(attempts.key, attempts.id, attempts.state).order_by(attempts.id)):
        folder = store.blobs.root / row.key / str(row.id)
        if row.key in busy or not SAFE.fullmatch(f"{row.key}/{row.id}") or not folder.exists():
            continue
        if published.get(row.key) == f"{row.key}/{row.id}":
            folder, why = folder / "checkpoints", "checkpoints of a finished cell"
        elif row.key in published and row.state in ("failed", "lost", "cancelled", "pruned"):
            why = f"an attempt that was {row.state}; the cell is done by another"
        elif row.state == "forgotten":
            why = "an attempt at a forgotten cell"
        else:
            continue
        if folder.exists():
            found.append(Leftover(path=folder, num_bytes=_size(folder), why=why))
    return found


def remove(found: list[Leftover]) -> int:
    """Delete them; returns the bytes that are free now."""
    for leftover in found:
        shutil.rmtree(leftover.path)
    return sum(leftover.num_bytes for leftover in found)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
