"""A cluster on this machine, as docs/cluster-on-kubernetes.md builds one: two Ray nodes in token mode, the store on
PostgreSQL, files in an S3 stand-in, MLflow on a server, and a Prefect pool whose runs are Ray jobs.

The sweep that runs on it has secrets everywhere; afterwards none may be found in anything that was written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL

from sweeps import queries, schema, services
from sweeps.store import Store
from tests.integration.world import break_cell
from tests.servers import RayNodes, answers, free_port, postgres, processes, ray_nodes, s3, until

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("services_up")]
SECRETS = {name: f"canary-{name}-5f3c" for name in ("database", "objects", "ray", "hub", "webhook")}


@dataclass(frozen=True)
class Cluster:
    ray: RayNodes
    environment: dict[str, str]  # of every process on it
    folder: Path  # logs of the servers
    store: Store


@pytest.fixture(scope="module")
def cluster(world, services_up, tmp_path_factory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    bin = Path(sys.executable).parent
    with (
        postgres(SECRETS["database"]) as database,
        s3("cells", "mlflow", secret=SECRETS["objects"]) as aws,
        processes(folder) as start,
    ):
        engine = sa.create_engine(
            database.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT"
        )
        with engine.connect() as connection:
            connection.execute(sa.text("CREATE DATABASE mlflow"))
        mlflow = f"http://127.0.0.1:{free_port()}"
        own = {
            **services.environment(services_up["prefect"].url), **aws,
            "MLFLOW_BACKEND_STORE_URI": database.replace("postgresql://", "postgresql+psycopg://").replace("/postgres", "/mlflow"),
            "MLFLOW_ARTIFACTS_DESTINATION": "s3://mlflow",
        }  # fmt: skip
        port = mlflow.rsplit(":", 1)[1]
        start("mlflow", [str(bin / "mlflow"), "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"], own)
        env = {
            **services.environment(services_up["prefect"].url), **aws, "GOLINEAR_DATABASE_URL": database,
            "GOLINEAR_BLOBS": "s3://cells", "MLFLOW_TRACKING_URI": mlflow, "HF_TOKEN": SECRETS["hub"],
            "GOLINEAR_WEBHOOK_URL": f"http://127.0.0.1:9/{SECRETS['webhook']}", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with ray_nodes(start, env, SECRETS["ray"]) as nodes:
            until(lambda: answers(f"{mlflow}/health"))
            worker = {
                **env,
                "RAY_API_SERVER_ADDRESS": nodes.jobs,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": SECRETS["ray"],
            }
            template = ROOT / "infra" / "prefect" / "ray-pool.json"
            pool = ["--pool", "ray", "--type", "process", "--install-policy", "never"]
            with get_client(sync_client=True) as client:
                made = WorkPoolCreate(name="ray", type="process", base_job_template=json.loads(template.read_text()))
                client.create_work_pool(made)
                like = client.read_deployment_by_name("sweep/ablation")
                client.create_deployment(
                    flow_id=like.flow_id, name="cluster", work_pool_name="ray", entrypoint="flows/sweep.py:sweep",
                    pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
                    parameter_openapi_schema=like.parameter_openapi_schema,
                )  # fmt: skip
            start("worker", [str(bin / "prefect"), "worker", "start", *pool], worker)
            store = Store(database, blobs="s3://cells")
            yield Cluster(nodes, env, folder, store)
            store.close()


def asked(world, name: str, **changes: Any) -> dict[str, Any]:
    small = {"tokens": 512, "sequence_length": 64, "batch_size": 2, "warmup_steps": 1, "tasks": "perplexity:256"}
    return {"models": world.model, "recipes": "gla 4+0,gdn 4+2", "name": name, **small, **changes}


def ask(cluster: Cluster, path: str) -> Any:
    """Ray's dashboard, with the token."""
    answer = httpx.get(cluster.ray.jobs + path, headers={"Authorization": f"Bearer {SECRETS['ray']}"}, timeout=20)
    answer.raise_for_status()
    return answer.json()


def actors(cluster: Cluster) -> list[dict[str, Any]]:
    found = ask(cluster, "/api/v0/actors?detail=true")["data"]["result"]["result"]
    return [actor for actor in found if actor["class_name"].endswith("Worker")]


def test_a_flow_run_of_the_pool_is_a_job_on_both_nodes(cluster, world):
    from prefect.deployments import run_deployment

    assert httpx.get(f"{cluster.ray.jobs}/api/jobs/", timeout=20).status_code == 401  # without the token
    ended = run_deployment(
        "sweep/cluster", parameters=asked(world, "as a job", workers=2), timeout=300, poll_interval=1
    )
    assert ended.state.is_completed(), str(ended.state.message) + (cluster.folder / "worker.log").read_text()
    until(lambda: ask(cluster, "/api/jobs/")[0]["status"] != "RUNNING", 30)
    (job,) = ask(cluster, "/api/jobs/")
    assert job["status"] == "SUCCEEDED" and job["submission_id"] == f"prefect-{ended.id}"
    assert len({actor["node_id"] for actor in actors(cluster)}) == 2
    assert {actor["state"] for actor in actors(cluster)} == {"DEAD"}  # nothing of the flow is left there

    published = {row.key: row.blob for row in cluster.store.read(sa.select(schema.results))}
    assert len(published) == 2
    import fsspec

    for blob in published.values():
        assert fsspec.filesystem("s3").exists(f"cells/{blob}/new_parameters.safetensors")
    artifacts = [path for path in fsspec.filesystem("s3").find("mlflow") if path.endswith("new_parameters.safetensors")]
    assert len(artifacts) == 2


def test_a_driver_elsewhere_uses_the_cluster_and_leaves_it_running(cluster, world):
    env = {
        **cluster.environment,
        "RAY_ADDRESS": cluster.ray.address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": SECRETS["ray"],
    }
    asked_for = asked(world, "from here", recipes="gdn 4+2", seeds=2)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in asked_for.items()]
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "ablation", *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cluster.store.read(sa.select(schema.results))) == 3
    nodes = ask(cluster, "/api/v0/nodes")["data"]["result"]["result"]
    assert [node["state"] for node in nodes] == ["ALIVE", "ALIVE"]
    assert cluster.ray.head.poll() is None and cluster.ray.other.poll() is None


def test_a_cancelled_run_stops_its_job_which_saves_first(cluster, world):
    from prefect.deployments import run_deployment
    from prefect.states import Cancelling

    def attempts() -> list[Any]:
        known = cluster.store.read(sa.select(schema.attempts).order_by(schema.attempts.c.id))
        return [row for row in known if "-s6-" in row.key]

    long = asked(world, "cancelled", recipes="gdn 4+2", seeds=6, tokens=2_000_000, checkpoint_minutes=0.02)
    run = run_deployment("sweep/cluster", parameters=long, timeout=0)
    until(lambda: any(row.tokens for row in attempts()), 200)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run.id, Cancelling())
        until(lambda: client.read_flow_run(run.id).state.is_cancelled(), 120)
    until(lambda: ask(cluster, f"/api/jobs/prefect-{run.id}")["status"] in ("STOPPED", "FAILED"), 90)
    (attempt,) = attempts()
    assert (attempt.state, attempt.cause) == ("failed", "preempted") and attempt.tokens


def test_what_fails_there_tells_why_and_no_secret(cluster, world):
    from prefect.deployments import run_deployment

    bad = asked(world, "bad", recipes="gdn 4+2", seeds=5)
    break_cell(bad, "gdn")
    ended = run_deployment("sweep/cluster", parameters=bad, timeout=300, poll_interval=1)
    assert ended.state.is_failed() and "gdn 4+2" in ended.state.message
    assert queries.failures(cluster.store)

    with get_client(sync_client=True) as client:
        told = json.dumps([run.model_dump(mode="json") for run in client.read_flow_runs(limit=200)])
    logs = httpx.post(f"{PREFECT_API_URL.value()}/logs/filter", json={"limit": 200}, timeout=30).text
    with cluster.store.engine.connect() as connection:
        rows = [str(list(connection.execute(sa.select(table)))) for table in schema.metadata.tables.values()]
    database = str(cluster.store.engine.url.render_as_string(hide_password=False)).replace("/postgres", "/mlflow")
    with sa.create_engine(database).connect() as connection:
        tables = sa.inspect(connection).get_table_names()
        rows += [str(list(connection.execute(sa.text(f'SELECT * FROM "{table}"')))) for table in tables]
    import fsspec

    filesystem = fsspec.filesystem("s3")
    texts = {"prefect": told, "prefect logs": logs, **{f"rows {i}": row for i, row in enumerate(rows)}}
    texts |= {
        path: filesystem.cat_file(path).decode(errors="replace")
        for b in ("cells", "mlflow")
        for path in filesystem.find(b)
    }
    ray_folder = ask(cluster, "/api/version").get("session_name", "")
    for root in (world.home, cluster.folder, *Path("/tmp").glob(f"glr-*/{ray_folder}")):
        for path in Path(root).rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_bytes().decode(errors="replace")
    assert len(texts) > 50 and any("session_" in where for where in texts)  # Ray's own logs are among them
    assert any("gdn 4+2" in row for row in rows)
    found = [(name, where) for where, text in texts.items() for name, secret in SECRETS.items() if secret in text]
    assert found == [], [(name, os.path.basename(where)) for name, where in found]
