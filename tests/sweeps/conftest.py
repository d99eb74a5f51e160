"""A store in a temporary home."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.store import Store


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
