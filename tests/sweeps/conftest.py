"""A store in a temporary home; a PostgreSQL server where one is installed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
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


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """TEST_DATABASE_URL, else a server of our own on a free port; skips without PostgreSQL or psycopg."""
    if given := os.environ.get("TEST_DATABASE_URL"):
        yield given
        return
    binaries = [*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/none/initdb").parent]
    home = next((path for path in binaries if (path / "initdb").exists()), None)
    if home is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL here, or no psycopg (pip install golinear[cluster])")
    # not below pytest's own folder: another pytest that starts closes that to other users
    folder = Path(tempfile.mkdtemp(prefix="golinear-postgres-"))
    as_root = os.geteuid() == 0  # which PostgreSQL refuses to run as
    if as_root:
        shutil.chown(folder, "nobody")

    def run(*words: object) -> None:
        command = shlex.join(map(str, words))
        full = ["su", "-s", "/bin/sh", "nobody", "-c", command] if as_root else shlex.split(command)
        subprocess.run(full, check=True, stdout=subprocess.DEVNULL, cwd=folder)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run(home / "initdb", "-D", folder / "data", "-A", "trust", "-U", "golinear", "-E", "UTF8")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run(home / "pg_ctl", "-w", "-D", folder / "data", "-o", options, "-l", folder / "log", "start")
    yield f"postgresql://golinear@127.0.0.1:{port}/postgres"
    run(home / "pg_ctl", "-D", folder / "data", "-m", "immediate", "stop")
    shutil.rmtree(folder)
