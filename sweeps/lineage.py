"""What a run was made from, for MLflow's lineage: the text it trained on, the data it was scored on, its base model.

Imports mlflow only inside functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from sweeps.cell import Cell

MAX_DIGEST = 36  # characters that MLflow keeps


def datasets(cell: Cell, tasks: Iterable[tuple[TaskSpec, str]]) -> list[Any]:
    """MLflow's dataset inputs of a cell: its training text and, by task, where the benchmark's data comes from."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    def made(name: str, digest: str, kind: str, source: dict[str, str], context: str) -> Any:
        text = Dataset(name=name, digest=digest[:MAX_DIGEST], source_type=kind, source=json.dumps(source))
        return DatasetInput(text, [InputTag("mlflow.data.context", context)])

    found = []
    if cell.data:
        kind = cell.data.partition("-")[0]
        found.append(made("training text", cell.data, kind, {"fingerprint": cell.data}, "training"))
    for task, source in tasks:
        digest = hashlib.sha256(f"{task.label} {source}".encode()).hexdigest()[:16]
        found.append(made(task.label, digest, "benchmark", {"source": source}, "evaluation"))
    return found


def base_model(client: Any, experiment_id: str, cell: Cell) -> Any:
    """MLflow's logged model of a cell's base model, made when it is not there yet; as a run's input."""
    from mlflow.entities import LoggedModelInput, LoggedModelStatus

    base = cell.base_of()
    known = client.search_logged_models([experiment_id], filter_string=f"name = '{base.train_key}'", max_results=1)
    if known:
        return LoggedModelInput(known[0].model_id)
    params = {"base": base.base, "revision": base.revision}
    model = client.create_logged_model(experiment_id, name=base.train_key, model_type="base", params=params)
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    return LoggedModelInput(model.model_id)
