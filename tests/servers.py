"""Servers of others that tests start for themselves: PostgreSQL, an S3 stand-in, MLflow, a Ray cluster of two nodes."""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def postgres(password: str = "") -> Iterator[str]:
    """Debian's PostgreSQL on a free port, as nobody where we are root. Yields its URL; skips where it is missing.

    ``password``: asked of every connection; without one, all are trusted.
    """
    binaries = [*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/none/initdb").parent]
    home = next((path for path in binaries if (path / "initdb").exists()), None)
    if home is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL here, or no psycopg (pip install golinear[cluster])")
    # not below pytest's own folder: another pytest that starts closes that to other users
    folder = Path(tempfile.mkdtemp(prefix="golinear-postgres-"))
    (folder / "password").write_text(password or "-")
    as_root = os.geteuid() == 0  # which PostgreSQL refuses to run as
    if as_root:
        shutil.chown(folder, "nobody")
        shutil.chown(folder / "password", "nobody")

    def run(*words: object) -> None:
        command = shlex.join(map(str, words))
        full = ["su", "-s", "/bin/sh", "nobody", "-c", command] if as_root else shlex.split(command)
        subprocess.run(full, check=True, stdout=subprocess.DEVNULL, cwd=folder)

    port = free_port()
    asked = ["-A", "scram-sha-256", "--pwfile", folder / "password"] if password else ["-A", "trust"]
    run(home / "initdb", "-D", folder / "data", *asked, "-U", "golinear", "-E", "UTF8")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run(home / "pg_ctl", "-w", "-D", folder / "data", "-o", options, "-l", folder / "log", "start")
    try:
        yield f"postgresql://golinear{':' + password if password else ''}@127.0.0.1:{port}/postgres"
    finally:
        run(home / "pg_ctl", "-D", folder / "data", "-m", "immediate", "stop")
        shutil.rmtree(folder)


@contextmanager
def s3(*buckets: str, secret: str = "secret") -> Iterator[dict[str, str]]:
    """moto's S3 on a free port, in this process. Yields the environment of its clients; skips without moto and s3fs."""
    if any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs")):
        pytest.skip("no moto or s3fs (pip install golinear[dev])")
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    httpx.post(f"http://{host}:{port}/moto-api/reset")  # what an earlier one of this process kept
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "golinear", "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").clear_instance_cache()
            for bucket in buckets:
                fsspec.filesystem("s3").mkdir(bucket)
            yield environment
    finally:
        server.stop()


@contextmanager
def processes(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Yields ``start(name, command, environment)``; what it started is ended by SIGTERM afterwards, children included.

    What they print is in ``folder/<name>.log``.
    """
    started: list[psutil.Process] = []
    folder.mkdir(parents=True, exist_ok=True)

    def start(name: str, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        started.append(psutil.Process(process.pid))
        return process

    try:
        yield start
    finally:
        family = [p for parent in started if parent.is_running() for p in (parent, *parent.children(recursive=True))]
        for process in started[::-1]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
                process.wait(20)
        for left in psutil.wait_procs(family, timeout=5)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s (load {os.getloadavg()[0]:.1f})"
        time.sleep(0.2)


def answers(url: str, **headers: str) -> bool:
    try:
        return httpx.get(url, headers=headers, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(frozen=True)
class RayNodes:
    """A cluster of two nodes with one CPU each, on loopback: GCS address, Jobs API, and the process of each node."""

    address: str
    jobs: str
    head: subprocess.Popen[bytes]
    other: subprocess.Popen[bytes]


@contextmanager
def ray_nodes(
    start: Callable[..., subprocess.Popen[bytes]], environment: dict[str, str], token: str
) -> Iterator[RayNodes]:
    """Two ``ray start --block`` in a folder of their own, token mode on. Ended with whoever gave ``start``."""
    port, dashboard = free_port(), free_port()
    # sockets below it: a path of pytest's would be too long for them
    folder = Path(tempfile.mkdtemp(prefix="glr-"))
    env = {**environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_JOB_STOP_WAIT_TIME_S": "60"}
    ray = str(Path(sys.executable).parent / "ray")

    def agents() -> list[str]:  # the usual ports are those of another Ray on this machine
        names = (
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        )
        return [f"--{name}={free_port()}" for name in names]

    common = [ray, "start", "--block", "--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
    head = start(
        "ray-head",
        [*common, *agents(), "--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}",
         "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"],
        env,
    )  # fmt: skip
    jobs = f"http://127.0.0.1:{dashboard}"
    until(lambda: answers(f"{jobs}/api/version", Authorization=f"Bearer {token}"))
    other = start("ray-node", [*common, *agents(), f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.1"], env)
    try:
        yield RayNodes(f"127.0.0.1:{port}", jobs, head, other)
    finally:
        for process in (other, head):
            process.terminate()
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
