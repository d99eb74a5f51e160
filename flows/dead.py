"""Ends what dead flows and workers left behind in MLflow and Prefect, so that both tell what is true."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.states import Crashed

from sweeps import flow_runs, queries
from sweeps.store import Store

log = logging.getLogger(__name__)
WHY = "its process died without a word; run the sweep again, it goes on"


def bury(store: Store, tracker: Any, say: Callable[[str], None]) -> None:
    """Cell runs without a live claim end KILLED; flows that died end KILLED in MLflow and CRASHED in Prefect."""
    for run in tracker.end_orphans(queries.live_runs(store), store.name):
        say(f"MLflow run {run} of a process that died: KILLED")
    for dead in flow_runs.bury(store):
        if dead.tracking_run:
            tracker.end(dead.tracking_run, "KILLED", WHY)
        if _crashed(dead.id):
            say(f"Prefect flow run {dead.id}, whose process died: CRASHED")


def _crashed(flow_run_id: str) -> bool:
    """Set a flow run that has not ended to CRASHED. False when it has, or this server does not know it."""
    try:
        with get_client(sync_client=True) as client:
            found = client.read_flow_run(flow_run_id)  # type: ignore[arg-type]
            if found.state is None or found.state.is_final():
                return False
            client.set_flow_run_state(flow_run_id, Crashed(message=WHY), force=True)  # type: ignore[arg-type]
    except (PrefectException, OSError) as error:
        log.info("flow run %s: %s", flow_run_id, error)
        return False
    return True
