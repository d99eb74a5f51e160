"""MLflow in one place: one parent run a sweep, one child run a cell. Imports mlflow only inside functions.

The store is migrated and the experiment made once (``prepare``) before anything fans out. Runs are ended explicitly by
``MlflowClient``; nothing depends on an active run of a thread or process. What is true stands in the store, not here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import Score, TaskSpec
from sweeps import lineage, mlflow_view
from sweeps.cell import Cell
from sweeps.home import home, shown, tracking_uri
from sweeps.mlflow_view import cell_params, metric_name
from sweeps.provenance import provenance

if TYPE_CHECKING:
    from sweeps.sweep import Sweep

log = logging.getLogger(__name__)
MAX_PARAM, MAX_TAG = 6000, 8000  # characters that MLflow keeps; longer values are cut by it without a word
PAGE = 1000
INPUT_TRIES = 8


def prepare(experiment: str, *, uri: str | None = None) -> Tracker:
    """Migrate the store, make the experiment (restored when it was deleted), and return a tracker for it.

    Call once, in one process, before workers start. Raises ValueError when the tracking server cannot be reached.
    """
    uri = uri or tracking_uri()
    location = None
    if uri.startswith("sqlite:"):
        database = Path(uri.removeprefix("sqlite:///"))
        database.parent.mkdir(parents=True, exist_ok=True)
        location = (home() / "mlflow-artifacts").as_uri()
    elif uri.startswith("http"):
        _check_server(uri)
    import mlflow
    from mlflow.exceptions import MlflowException

    client = mlflow.MlflowClient(tracking_uri=uri)
    try:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            experiment_id = client.create_experiment(
                experiment, artifact_location=location and f"{location}/{_file(experiment)}"
            )
        else:
            experiment_id = found.experiment_id
            if found.lifecycle_stage == "deleted":
                client.restore_experiment(experiment_id)
        for name, value in mlflow_view.KIND.items():
            client.set_experiment_tag(experiment_id, name, value)
    except MlflowException as error:
        raise ValueError(f"MLflow at {shown(uri)} cannot be used: {shown(str(error))}") from error
    return Tracker(uri, experiment_id)


def _check_server(uri: str) -> None:
    """Asked before MLflow is, which tries for minutes. Raises ValueError when nothing healthy answers within seconds."""
    import httpx

    try:
        httpx.get(f"{uri.rstrip('/')}/health", timeout=5).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"MLflow at {shown(uri)} cannot be used: {shown(str(error))}") from error


class Tracker:
    """Runs of one experiment. Small and picklable: workers make their own client from its address."""

    def __init__(self, uri: str, experiment_id: str):
        self.uri, self.experiment_id = uri, experiment_id
        self._client: Any = None
        self._base_models: dict[str, Any] = {}  # by key of the base model
        self._lineage_lock = Lock()

    def __reduce__(self) -> Any:
        return Tracker, (self.uri, self.experiment_id)

    @property
    def client(self) -> Any:
        if self._client is None:
            import mlflow

            self._client = mlflow.MlflowClient(tracking_uri=self.uri)
        return self._client

    def start_sweep(self, name: str, sweep_id: str, *, tags: Mapping[str, str] | None = None, note: str = "") -> str:
        """The parent run of a sweep; the one that is there already when it goes on. Returns its id."""
        known = list(self.search(f"tags.kind = 'sweep' and tags.sweep_id = '{sweep_id}'"))
        if known:
            run_id = known[0].info.run_id
            self.client.update_run(run_id, status="RUNNING")
        else:
            run_id = self.client.create_run(
                self.experiment_id, run_name=name, tags={"kind": "sweep", "sweep_id": sweep_id}
            ).info.run_id
        self.set_tags(run_id, {**(tags or {}), **({"mlflow.note.content": note} if note else {})})
        return run_id

    def show_sweep(self, run_id: str, name: str, sweep_id: str, sweep: Sweep) -> None:
        """What a sweep asked for as parameters of its run, and an entry of the experiment's menu "Views"; of these the
        newest ``mlflow_view.MAX_VIEWS`` are kept."""
        self.log_params(run_id, mlflow_view.sweep_params(sweep))
        saved = mlflow_view.saved_view(name, sweep_id, sweep, time.time())
        self.client.set_experiment_tag(self.experiment_id, mlflow_view.SHARED_VIEW + sweep_id, saved)
        for old in mlflow_view.outdated(self.client.get_experiment(self.experiment_id).tags):
            self.client.delete_experiment_tag(self.experiment_id, old)

    def note_sweep(self, run_id: str, sweep_id: str, markdown: str, runs: Sequence[str] = ()) -> None:
        """The note of a sweep's run: links to its cells, and the table. ``runs``: of its finished cells; those that another
        sweep trained are marked as members of this one too."""
        links = mlflow_view.links(self.experiment_id, sweep_id, runs)
        self.set_tags(run_id, {"mlflow.note.content": f"{links}\n\n{markdown}"})
        member = mlflow_view.member_tag(sweep_id)
        own = {run.info.run_id for run in self.search(f"tags.`{member}` = 'yes'")}
        for shared in runs:
            if shared not in own:
                self.client.set_tag(shared, member, "yes")

    def start_cell(
        self,
        parent: str,
        cell: Cell,
        *,
        sweep_id: str = "",
        tags: Mapping[str, str] | None = None,
        tasks: Iterable[tuple[TaskSpec, str]] = (),
    ) -> str:
        """A child run for one attempt at a cell: every axis a flat parameter, the whole configuration an artifact, commit,
        lock hash and versions as tags, and what it is made from as inputs (``tasks``: with their data's source)."""
        from mlflow.exceptions import MlflowException

        own = {"kind": "cell", "train_key": cell.train_key, "sweep_id": sweep_id, "mlflow.parentRunId": parent}
        if sweep_id:
            own[mlflow_view.member_tag(sweep_id)] = "yes"
        started = {**own, **_origin(provenance()), **(tags or {})}
        run_id = self.client.create_run(self.experiment_id, run_name=cell.label, tags=started).info.run_id
        self.log_params(run_id, cell_params(cell))
        self.client.log_dict(run_id, {"train_key": cell.train_key, "inputs": cell.inputs}, "cell.json")
        with self._lineage_lock:
            base = cell.base_of().train_key
            if base not in self._base_models:
                self._base_models[base] = lineage.base_model(self.client, self.experiment_id, cell)
            log_inputs = functools.partial(
                self.client.log_inputs, run_id, datasets=lineage.datasets(cell, tasks), models=[self._base_models[base]]
            )
            for _ in range(INPUT_TRIES - 1):  # of those that log a new data set at once MLflow refuses all but one
                with contextlib.suppress(MlflowException):
                    log_inputs()
                    break
                time.sleep(random.uniform(0, 0.2))  # another process was first: now it is there
            else:
                log_inputs()
        return run_id

    def log_trained(self, run_id: str, cell: Cell, found: Mapping[str, Any]) -> None:
        """What training gave: sizes as parameters, where it came from as tags, and the model itself for MLflow's lineage."""
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        self.log_params(run_id, {"new_parameters": found["new_parameters"]})
        if seconds := found.get("train_seconds"):
            self.log_metrics(run_id, {"cost/train_minutes": seconds / 60})
        self.set_tags(run_id, _origin(found))
        model = self.client.create_logged_model(
            self.experiment_id, name=cell.train_key, source_run_id=run_id, model_type="linearized",
            params={name: str(value) for name, value in cell_params(cell).items()}, tags={"train_key": cell.train_key},
        )  # fmt: skip
        self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
        self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def log_params(self, run_id: str, params: Mapping[str, Any]) -> None:
        """Parameters, whole: a value over MLflow's length goes to an artifact of its name instead of being cut."""
        from mlflow.entities import Param

        short = []
        for name, value in params.items():
            text = str(value)
            if len(text) > MAX_PARAM:
                self.client.log_text(run_id, text, f"params/{_file(name)}.txt")
                text = f"see params/{_file(name)}.txt"
            short.append(Param(metric_name(name), text))
        for start in range(0, len(short), 100):
            self.client.log_batch(run_id, params=short[start : start + 100])

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Tags; a text that MLflow would cut ends in an ellipsis and is kept whole as an artifact."""
        from mlflow.entities import RunTag

        kept = []
        for name, value in tags.items():
            text = str(value)
            if len(text) > MAX_TAG:
                self.client.log_text(run_id, text, f"tags/{_file(name)}.txt")
                text = text[: MAX_TAG - 1] + "…"
            kept.append(RunTag(name, text))
        if kept:
            self.client.log_batch(run_id, tags=kept)

    def log_system(self, run_id: str, values: Mapping[str, float], *, step: int) -> None:
        """One sample of the machine (sweeps.system_metrics), for MLflow's page of system metrics."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self.client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def log_curve(self, run_id: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Training curve: ``train/<name>`` of every finite number in a row, step = tokens seen."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(f"train/{metric_name(name)}", float(value), now, int(row["tokens_seen"]))
            for row in rows
            for name, value in row.items()
            if name not in mlflow_view.NO_CURVE and mlflow_view.is_number(value)
        ]
        for start in range(0, len(metrics), 1000):
            self.client.log_batch(run_id, metrics=metrics[start : start + 1000])

    def log_metrics(self, run_id: str, values: Mapping[str, float]) -> None:
        """Single values, which MLflow draws as bars."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        if values:
            self.client.log_batch(run_id, metrics=[Metric(name, value, now, 0) for name, value in values.items()])

    def log_scores(self, run_id: str, cell: Cell, scores: Iterable[Score], *, base: Iterable[Score] = ()) -> None:
        """``eval/…`` and ``gap/…`` (against the base model's scores) as ``mlflow_view.score_metrics`` names them, and what
        the cell costs; all scores, with reasons and details, as scores/<task>.json."""
        found = list(scores)
        self.log_metrics(run_id, mlflow_view.score_metrics(found, base) | mlflow_view.cell_costs(cell))
        by_task: dict[str, list[dict[str, Any]]] = {}
        for score in found:
            by_task.setdefault(score.task.label, []).append(score.to_dict())
        for label, rows in by_task.items():
            self.client.log_text(run_id, json.dumps(rows, indent=1, default=str), f"scores/{_file(label)}.json")

    def log_files(self, run_id: str, folder: Path, names: Iterable[str]) -> None:
        """Files of a cell's folder as artifacts; those that are not there are left out."""
        for name in names:
            if (folder / name).exists():
                self.client.log_artifact(run_id, str(folder / name))

    def log_text(self, run_id: str, text: str, name: str) -> None:
        self.client.log_text(run_id, text, name)

    def end(self, run_id: str, status: str = "FINISHED", reason: str = "") -> None:
        """FINISHED, FAILED or KILLED, with the reason as tag and note."""
        if reason:
            self.set_tags(run_id, {"reason": reason, "mlflow.note.content": reason})
        self.client.set_terminated(run_id, status=status)

    def search(self, query: str = "", *, page: int = PAGE, experiments: list[str] | None = None) -> Iterator[Any]:
        """All runs that match, however many: page by page. ``experiments``: their ids; default this one."""
        token = None
        while True:
            found = self.client.search_runs(experiments or [self.experiment_id], query, max_results=page, page_token=token)
            yield from found
            token = found.token
            if not token:
                return

    def end_orphans(self, live: Iterable[str], store: str) -> list[str]:
        """End every cell run of a store (its name) that still says RUNNING without a live attempt (``live``: their run ids) as
        KILLED, whatever its experiment; others may use this server with a store of their own.

        Called before planning. Returns the ids that were ended.
        """
        alive = set(live)
        ended = []
        everywhere = [experiment.experiment_id for experiment in self.client.search_experiments()]
        mine = f"attributes.status = 'RUNNING' and tags.kind = 'cell' and tags.store = '{store}'"
        for run in self.search(mine, experiments=everywhere):
            if run.info.run_id not in alive:
                self.end(run.info.run_id, "KILLED", "its process died without ending the run; the cell runs again")
                ended.append(run.info.run_id)
        return ended


def _origin(found: Mapping[str, Any]) -> dict[str, str]:
    """Where a run comes from, as tags: commit, lock hash (of all installed packages), hardware, versions."""
    origin = {name: str(found[name]) for name in ("commit", "dirty", "hardware", "environment", "at")}
    return origin | {f"version.{name}": text for name, text in found["versions"].items()}


def _file(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).strip(".") or "_"
