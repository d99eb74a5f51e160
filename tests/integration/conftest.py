"""One Prefect server, one Ray and one home of SQLite stores for all integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sweeps.services import environment
from tests.integration.world import make_data, make_model


@dataclass(frozen=True)
class World:
    """Folders of this session; the environment names them."""

    home: Path
    data: Path
    model: str


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Tiny model, texts and an environment that points at them; for this process and all that it starts."""
    root = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "GOLINEAR_DATABASE_URL",
            "GOLINEAR_BLOBS",
            "MLFLOW_TRACKING_URI",
            "RAY_ADDRESS",
            "PREFECT_API_URL",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("GOLINEAR_HOME", str(root / "home"))
        patch.setenv("GOLINEAR_CACHE", str(root / "cache"))
        patch.setenv("GOLINEAR_DATA", str(make_data(root / "data")))
        for name, value in environment().items():
            patch.setenv(name, value)
        yield World(home=root / "home", data=root / "data", model=str(make_model(root / "tiny")))


@pytest.fixture(scope="session")
def prefect_server(world: World) -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def ray_here(world: World) -> Iterator[None]:
    from flows.cluster import cluster

    with cluster():
        yield
