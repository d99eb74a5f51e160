"""The command of pool ``ray`` (infra/prefect/ray-pool.json): submits a flow run, whole, as a Ray job and waits for it.

The job's environment is the cluster's own: settings and secrets are there, and nothing but the flow run's id travels with
the job, which Ray's dashboard shows to everybody.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
POLL_SECONDS = 2.0
PATIENCE_SECONDS = 300.0  # for a cluster that starts, or whose head is replaced


def main() -> int:
    """Exit status 0 when the flow ran to its end (Prefect knows its state), 1 when its process failed or was stopped.

    SIGTERM (the run is cancelled, or the worker stops) stops the job: the flow saves and ends. A job of this flow run
    that is there already is waited for. Raises ValueError without a flow run or an address.
    """
    from ray.job_submission import JobStatus, JobSubmissionClient

    flow_run = os.environ.get("PREFECT__FLOW_RUN_ID")
    address = os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    if not flow_run or not address:
        raise ValueError(
            "set RAY_API_SERVER_ADDRESS to http://HOST:8265; PREFECT__FLOW_RUN_ID comes from Prefect's worker"
        )
    client = _patient(lambda: JobSubmissionClient(address))
    job = f"prefect-{flow_run}"
    given: dict[str, Any] = {
        "entrypoint": f"python -m prefect.engine {flow_run}",
        "submission_id": job,
        "runtime_env": {"env_vars": {"PREFECT__FLOW_RUN_ID": flow_run}},
        "metadata": {"prefect_flow_run": flow_run},
    }
    try:
        _patient(lambda: client.submit_job(**given))
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
    signal.signal(signal.SIGTERM, lambda *_: client.stop_job(job))
    _say(f"Ray job {job} at {address}")
    status = _follow(client, job)
    _say(f"Ray job {job}: {status}")
    return 0 if status == JobStatus.SUCCEEDED else 1


def _patient(ask: Callable[[], T]) -> T:
    """Ask again while the cluster is not there (yet): no connection, or a head whose agents are still starting."""
    until, said = time.monotonic() + PATIENCE_SECONDS, ""
    while True:
        try:
            return ask()
        except (OSError, RuntimeError) as error:
            away = isinstance(error, OSError) or "No available agent" in str(error)
            if not away or time.monotonic() > until:
                raise
            if said != (said := str(error).splitlines()[0]):
                _say(f"waiting for Ray: {said}")
            time.sleep(POLL_SECONDS)


def _follow(client: Any, job: str) -> Any:
    """Copies the job's log until the job has ended; its status then."""

    async def copy() -> None:
        async for lines in client.tail_job_logs(job):
            sys.stdout.write(lines)
            sys.stdout.flush()

    while not (status := _patient(lambda: client.get_job_status(job))).is_terminal():
        try:
            asyncio.run(copy())
        except Exception as error:  # noqa: BLE001 - the log is for people; the job goes on without it
            _say(f"the job's log cannot be read ({type(error).__name__})")
        time.sleep(POLL_SECONDS)
    return status


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
