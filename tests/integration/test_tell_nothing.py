"""Secrets of the environment are nowhere in what a sweep writes: the store, logs, artifacts, MLflow, Prefect, Ray.

The environment of all integration tests holds them (``world``), so whatever these wrote before is searched too.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from tests.integration.conftest import CANARY
from tests.integration.test_sweep import request, run
from tests.integration.world import break_cell

pytestmark = [pytest.mark.usefixtures("services_up", "ray_here"), pytest.mark.timeout(300)]


def test_no_secret_is_written_by_a_sweep_that_ends_and_one_that_fails(world, caplog, capfd):
    said = logging.handlers.BufferingHandler(10_000)  # Prefect arranges the other handlers anew when a flow starts
    logging.getLogger("flows").addHandler(said)
    assert CANARY in os.environ["HF_TOKEN"] and CANARY in os.environ["GOLINEAR_WEBHOOK_URL"]
    assert run(**request(world, "two")).is_completed()
    asked = request(world, "broken", recipes="gdn 4+2", seeds=9)
    break_cell(asked, "gdn")
    failed = run(**asked)
    assert failed.is_failed() and CANARY not in failed.message
    refused = run(**request(world, "refused", models="no/such"))
    assert refused.is_failed() and CANARY not in refused.message
    logging.getLogger("flows").removeHandler(said)
    ours = "\n".join(logging.Formatter().format(record) for record in said.buffer)
    assert "nobody was told of the flow's end" in ours  # the webhook does not answer, and its URL is a secret
    assert CANARY not in ours + caplog.text + "".join(capfd.readouterr())

    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    roots = [world.home, world.checkout, session]
    files = [path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 50 and any(path.name == "mlflow.db" for path in files), PREFECT_API_URL.value()
    assert any("prefect" in path.name and path.suffix == ".db" for path in files)
    assert [str(path) for path in files if CANARY.encode() in path.read_bytes()] == []


def test_everything_listens_on_loopback_and_ray_asks_for_a_token(services_up):
    import psutil

    assert os.environ["RAY_AUTH_MODE"] == "token"
    parents = [psutil.Process(os.getpid()), *(psutil.Process(s.pid) for s in services_up.values() if s.pid)]
    family = {child for parent in parents for child in (parent, *parent.children(recursive=True))}
    sockets = [
        (c, p.name()) for p in family if p.is_running() for c in p.net_connections("inet") if c.status == "LISTEN"
    ]
    listening = {(socket.laddr.ip.removeprefix("::ffff:"), name) for socket, name in sockets}
    assert {"gcs_server", "raylet"} <= {name for _, name in listening}
    assert {(ip, name) for ip, name in listening if not ip.startswith("127.") and ip != "::1"} == set()
