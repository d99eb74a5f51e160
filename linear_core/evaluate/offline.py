"""Where a task's data comes from: files of ``GOLINEAR_DATA``, else the hub, else nowhere, with the reason.

``redirect`` is the one place where lm-eval's downloads are answered from files. Imports no torch, no datasets.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from linear_core.device import device_name
from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import TASKS, Task

PROBE_SECONDS = 4.0


def data_folder() -> Path | None:
    """The folder ``GOLINEAR_DATA`` names, None when it is not set. Raises ValueError when it cannot be read."""
    given = os.environ.get("GOLINEAR_DATA")
    if not given:
        return None
    folder = Path(given)
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        raise ValueError(
            f"GOLINEAR_DATA={given} is not a readable folder; allowed: one with files such as mmlu_test.jsonl.gz"
        )
    return folder


def task_files(task: Task) -> list[Path] | None:
    """The files that serve a task, None when ``GOLINEAR_DATA`` lacks one of them or the task has none."""
    folder = data_folder()
    files = [folder / name for name in task.files] if folder else []
    return files if files and all(f.is_file() for f in files) else None


def data_source(task: TaskSpec) -> tuple[str, bool, str]:
    """(source, available, reason): what a score would be made from, and how to get it when it cannot be had.

    A source names files with their digest, or the hub data set, or says that the data is generated. Costs seconds at
    most, once a process. Raises ValueError for an unreadable ``GOLINEAR_DATA``.
    """
    known = TASKS[task.name]
    if known.kind == "speed":
        return f"random tokens, seed {task.seed}, on {device_name()}", True, ""
    generated = f"generated, seed {task.seed}" if known.kind == "ruler" else ""
    if not known.files and not known.hub:
        return generated, True, ""
    if (files := task_files(known)) is not None:
        return (
            "; ".join([*([generated] if generated else []), *(f"{f.name} sha256:{digest(f)}" for f in files)]),
            True,
            "",
        )
    source = "; ".join([*([generated] if generated else []), f"hub {known.hub}"])
    if in_hub_cache(known.hub) or hub_reachable():
        return source, True, ""
    wanted = f"set GOLINEAR_DATA to a folder with {' and '.join(known.files)}, or " if known.files else ""
    return source, False, f"no data: the hub cannot be reached; {wanted}make {known.hub} reachable"


@cache
def _digest(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def digest(path: Path) -> str:
    """First 16 hex digits of the file's SHA-256, computed once while the file does not change."""
    stat = path.stat()
    return _digest(str(path), stat.st_size, stat.st_mtime_ns)


def in_hub_cache(hub_id: str) -> bool:
    """Whether a hub data set lies in the local datasets cache, so that it loads without the network."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return (folder / hub_id.replace("/", "___")).is_dir()


@cache
def hub_reachable() -> bool:
    """One probe a process, a few seconds at most. False when ``HF_HUB_OFFLINE`` or ``HF_DATASETS_OFFLINE`` is set."""
    if any(
        os.environ.get(name, "0").lower() not in ("", "0", "false", "no")
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    ):
        return False
    answered = threading.Event()

    def probe() -> None:
        import httpx

        with contextlib.suppress(httpx.HTTPError, OSError):
            httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=PROBE_SECONDS)
            answered.set()

    threading.Thread(target=probe, daemon=True, name="hub-probe").start()  # a name look-up has no time-out of its own
    return answered.wait(PROBE_SECONDS + 1)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a ``.jsonl.gz`` file. Raises ValueError naming the file when it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a readable .jsonl.gz file ({error})") from error


def read_json(path: Path) -> Any:
    """The value of a ``.json.gz`` file. Raises ValueError naming the file when it is damaged."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a readable .json.gz file ({error})") from error


def _mmlu(files: list[Path], subject: str | None) -> dict[str, list[dict[str, Any]]]:
    dev, test = (_by_subject(str(f), digest(f)) for f in files)
    if subject not in test:
        raise ValueError(f"{files[1]} has no MMLU subject {subject!r}")
    return {"dev": dev[subject], "test": test[subject]}


@cache
def _by_subject(path: str, _digest: str) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_rows(Path(path)):
        rows.setdefault(row["subject"], []).append(row)
    return rows


# hub id → rows of each split from the task's files and the configuration's name
_SERVED = {
    "cais/mmlu": ("mmlu", _mmlu),
    "EleutherAI/lambada_openai": ("lambada_openai", lambda files, name: {"test": read_rows(files[0])}),
    "baber/paul_graham_essays": ("niah_single_2", lambda files, name: {"train": read_rows(files[0])}),
}
_lock = threading.RLock()


@contextlib.contextmanager
def redirect() -> Iterator[None]:
    """Inside, ``datasets.load_dataset`` answers from the files of ``GOLINEAR_DATA`` what they hold."""
    import datasets

    with _lock:
        original = datasets.load_dataset

        def load_dataset(
            path: str, name: str | None = None, *args: Any, split: str | None = None, **kwargs: Any
        ) -> Any:
            task, rows_of = _SERVED.get(path, (None, None))
            files = task_files(TASKS[task]) if task else None
            if files is None or rows_of is None:
                return original(path, name, *args, split=split, **kwargs)
            splits = {key: datasets.Dataset.from_list(rows) for key, rows in rows_of(files, name).items()}
            return splits[split] if split else datasets.DatasetDict(splits)

        datasets.load_dataset = load_dataset
        try:
            yield
        finally:
            datasets.load_dataset = original
