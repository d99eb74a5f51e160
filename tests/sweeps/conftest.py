"""A store in a temporary home; a PostgreSQL server where one is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.store import Store
from tests.servers import postgres


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path))
    for name in ("GOLINEAR_DATABASE_URL", "GOLINEAR_BLOBS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    opened = Store()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """TEST_DATABASE_URL, else a server of our own; skips without PostgreSQL or psycopg."""
    if given := os.environ.get("TEST_DATABASE_URL"):
        yield given
        return
    with postgres() as url:
        yield url
