"""One set of services (Prefect, its worker, MLflow), one Ray and one home of SQLite stores for all integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sweeps import services
from sweeps.services import Running
from tests.integration.world import make_data, make_model

ROOT = Path(__file__).parents[2]
CANARY = "canary-5f3c"  # in every secret that these tests run with; test_tell_nothing looks for it afterwards


@dataclass(frozen=True)
class World:
    """Folders of this session; the environment names them."""

    home: Path
    data: Path
    checkout: Path
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
        patch.setenv("HF_TOKEN", f"hf_{CANARY}")
        patch.setenv("GOLINEAR_WEBHOOK_URL", f"http://127.0.0.1:9/{CANARY}")
        for name, value in services.environment().items():
            patch.setenv(name, value)
        (root / "checkout").mkdir()
        model = make_model(root / "tiny")
        yield World(home=root / "home", data=root / "data", checkout=root / "checkout", model=str(model))


@pytest.fixture(scope="session")
def services_up(world: World) -> Iterator[dict[str, Running]]:
    """What `golinear up` starts, in a folder that looks like a checkout; this process's Prefect talks to it."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    for name in ("prefect.yaml", "flows", "sweeps", "linear_core"):
        (world.checkout / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world.checkout)
        try:
            running = services.up(obtain_model=False)
            with temporary_settings({PREFECT_API_URL: f"{running['prefect'].url}/api"}):
                yield running
        finally:
            started = services.records().values()
            services.down()
        assert started and not any(service.alive for service in started)


@pytest.fixture(scope="session")
def ray_here(world: World) -> Iterator[None]:
    from flows.cluster import cluster

    with cluster(num_gpus=2):  # places that ranks on the CPU stand in
        yield
