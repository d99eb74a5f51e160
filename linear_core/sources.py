"""Where training text comes from: names of sources, their identity, and their documents in one fixed order.

A source is one string:
  ``auto``        the folder GOLINEAR_DATA, else the hub data set DEFAULT_HUB, else ``self``
  ``local:PATH``  a .jsonl, .jsonl.gz or .parquet file, or a folder of them; a folder with ``train_text.*`` trains on
                  that, and ``heldout_text.*`` beside it is its held-out text
  ``hub:NAME[@REVISION][:SPLIT]``  a Hugging Face data set, streamed
  ``self``        samples that the base model writes itself (linear_core.self_samples)
Imports neither torch nor datasets at module level, so that a plan can name its data at once.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linear_core import models

logger = logging.getLogger(__name__)

DEFAULT_HUB = "HuggingFaceTB/dclm-edu"
ALLOWED = "auto, local:PATH (.jsonl, .jsonl.gz, .parquet or a folder of them), hub:NAME[@REVISION][:SPLIT], self"
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
HUB_TIMEOUT = 5.0  # seconds until a hub that does not answer counts as unreachable
WHOLE_FILE = 1 << 28  # bytes up to which a file's digest reads all of it


class HubBusy(ValueError):
    """The hub answers that it has no time now (429, 5xx)."""


@dataclass(frozen=True)
class Source:
    """One place that text comes from. location: path of the training text, or hub name. heldout: path of its own
    held-out text, empty when the held-out slice is split off by hash. revision, split: of a hub data set."""

    kind: str  # local, hub, self
    location: str = ""
    heldout: str = ""
    revision: str = ""
    split: str = "train"

    @property
    def name(self) -> str:
        """The string that ``resolve`` turns into this source again."""
        if self.kind == "self":
            return "self"
        if self.kind == "local":
            return f"local:{Path(self.location).parent if self.heldout else self.location}"
        return f"hub:{self.location}@{self.revision}:{self.split}"


def resolve(source: str) -> Source:
    """A source's string → Source; ``auto`` becomes what it stands for now.

    Raises ValueError, naming what is allowed, for another form, a path that cannot be read, a folder without text,
    an unreadable GOLINEAR_DATA, and a hub data set whose revision neither the hub nor an earlier use tells: HubBusy when
    it may tell later, which ``auto`` does not take for an absent hub.
    """
    if source == "self":
        return Source("self")
    if source == "auto":
        return _auto()
    kind, _, rest = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind == "local" and rest:
        return _local(Path(rest).expanduser(), f"data source {source!r}")
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)(?:@([\w.-]+))?(?::([\w.\[\]%-]+))?", rest) if kind == "hub" else None
    if match is None:
        raise ValueError(f"data source {source!r} is not known; allowed: {ALLOWED}")
    name, revision, split = match[1], match[2], match[3] or "train"
    return Source("hub", name, revision=revision or _hub_revision(name), split=split)


def data_fingerprint(source: str) -> str:
    """Identity of what a source holds, as ``kind-16hex``; the same bytes at another path are the same data.

    Files are digested (those above 256 MiB by size and 256 samples), hub data sets go by revision, ``self`` by its
    sampling settings: the base model is in a cell's key already. Imports no torch. Raises as ``resolve`` does.
    """
    found = resolve(source)
    if found.kind == "self":
        from linear_core.self_samples import SETTINGS

        content = repr(SETTINGS)
    elif found.kind == "hub":
        content = f"{found.location}@{found.revision}:{found.split}"
    else:
        content = ",".join(file_digest(path) for path in text_files(Path(found.location)))
        content += f" heldout={'own' if found.heldout else 'hash'}"
    return f"{found.kind}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def documents(source: Source, heldout: bool, skip: int = 0) -> Iterator[tuple[int, str]]:
    """(position in the source, text) of every document of a local or hub source from position ``skip`` on, of one part.

    heldout: the held-out part, else the part to train on. Without a held-out text of its own, one document in
    32 is held out, chosen by a hash of its text, so that a document and its copies are all on one side.
    Raises ValueError for a row without text.
    """
    if heldout and source.heldout:
        rows, first = _read_files([Path(source.heldout)]), 0
    elif source.kind == "hub":
        rows, first = _hub_rows(source, skip), skip
    else:
        rows, first = _read_files(text_files(Path(source.location))), 0
    for i, text in enumerate(rows, start=first):
        if i >= skip and (source.heldout or is_heldout(text) == heldout):
            yield i, text


def is_heldout(text: str) -> bool:
    """Whether the hash rule holds this document out: one in 32."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] < 8


def text_files(path: Path) -> list[Path]:
    """The files of a local source in the order they are read: the file itself, or those of a folder by name."""
    if path.is_file():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))


def _auto() -> Source:
    if folder := os.environ.get("GOLINEAR_DATA"):
        path = Path(folder).expanduser()
        if not any((path / f"train_text{suffix}").is_file() for suffix in SUFFIXES):
            raise ValueError(
                f"GOLINEAR_DATA is {folder!r}, which has no readable train_text.jsonl.gz; allowed: a folder with "
                "train_text.jsonl.gz and heldout_text.jsonl.gz, or GOLINEAR_DATA not set"
            )
        return _local(path, f"GOLINEAR_DATA {folder!r}")
    try:
        return Source("hub", DEFAULT_HUB, revision=_hub_revision(DEFAULT_HUB))
    except HubBusy:
        raise  # another text would be another study
    except ValueError as error:
        logger.warning("training text: the base model's own samples, because %s", error)
        return Source("self")


def _local(path: Path, what: str) -> Source:
    for suffix in SUFFIXES:
        train, heldout = path / f"train_text{suffix}", path / f"heldout_text{suffix}"
        if train.is_file():
            _check_readable(train, what)
            if heldout.is_file():
                _check_readable(heldout, what)
            return Source("local", str(train), heldout=str(heldout) if heldout.is_file() else "")
    files = text_files(path)
    if not files or not files[0].name.endswith(SUFFIXES):
        state = "does not exist" if not path.exists() else f"has no {', '.join(SUFFIXES)} file"
        raise ValueError(f"{what}: {str(path)!r} {state}; allowed: {ALLOWED}")
    for file in files:
        _check_readable(file, what)
    return Source("local", str(path))


def _check_readable(path: Path, what: str) -> None:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{what}: {str(path)!r} cannot be read (permission denied)")


def _read_files(files: list[Path]) -> Iterator[str]:
    for path in files:
        if path.name.endswith(".parquet"):
            yield from _read_parquet(path)
            continue
        opened = gzip.open(path, "rt", encoding="utf-8") if path.name.endswith(".gz") else path.open(encoding="utf-8")
        with opened as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _text_of(json.loads(line), f"{path}, line {number}")
            except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(f'{path} is not JSON lines: {error}; allowed: one {{"text": …}} a line') from error


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        if "text" not in table.schema_arrow.names:
            raise ValueError(f"{path} has no column 'text'; it has {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            for row in batch.to_pylist():
                yield _text_of(row, str(path))


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no 'text' string (it has {keys}); allowed: rows with a field 'text'")
    return text


def file_digest(path: Path) -> str:
    """Digest of a file's content, hex; remembered while its size and time stay as they are."""
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _digest(path: Path, size: int, modified: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_FILE:
            while block := file.read(1 << 22):
                digest.update(block)
        else:
            for i in range(256):
                file.seek((size - 65536) * i // 255)
                digest.update(file.read(65536))
    return digest.hexdigest()


def _hub_revision(name: str) -> str:
    """The data set's commit: the hub's, else the last one used on this machine."""
    revision, reason, busy = _ask_hub(name)
    remembered = models.cache_folder() / "hub_revisions" / name.replace("/", "--")
    if revision:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(revision)
        return revision
    if remembered.exists():
        return remembered.read_text().strip()
    if busy:
        raise HubBusy(f"hub data set {name!r}: the hub is busy ({reason}); try again, or name local:PATH or self")
    raise ValueError(f"hub data set {name!r} cannot be had ({reason}); else local:PATH or self")


@functools.cache
def _ask_hub(name: str) -> tuple[str, str, bool]:
    """(commit, why there is none, whether to ask again later), within HUB_TIMEOUT seconds; asked once a process."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(name, timeout=HUB_TIMEOUT).sha or "", "it has no commit", False
    except Exception as error:  # noqa: BLE001 - the hub client raises many kinds; all mean "not now"
        status = getattr(getattr(error, "response", None), "status_code", 0)
        return "", _reason(error), status in (408, 429) or status >= 500


def _hub_rows(source: Source, skip: int) -> Iterator[str]:
    """Texts of a streamed data set from row ``skip`` on. Raises ValueError when the stream breaks for good."""
    import datasets

    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 3
    datasets.config.STREAMING_READ_RETRY_INTERVAL = datasets.config.STREAMING_OPEN_RETRY_INTERVAL = 1
    datasets.config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 2
    try:
        stream = datasets.load_dataset(source.location, revision=source.revision, split=source.split, streaming=True)
        for row in stream.skip(skip) if skip else stream:
            yield _text_of(row, f"hub data set {source.location}")
    except (OSError, RuntimeError) as error:
        raise ValueError(f"hub data set {source.location!r}, {source.split!r}, broke off: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
