"""Files of published attempts by name, in a folder or at any fsspec URL (``s3://…``). Holds blobs, never locks."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import fsspec

from sweeps.home import home, shown

CHECKPOINTS = "checkpoints"  # of an attempt's folder: kept only until its cell is published
SAFE = re.compile(r"[a-z0-9_-]+/[0-9]+")


class Blobs:
    """``put`` a finished folder under ``<key>/<attempt>``, ``fetch`` it elsewhere.

    With a local root (the default, ``<home>/cells``) attempts are written in place and ``put`` copies nothing.
    ``GOLINEAR_BLOBS`` or ``url`` names another place; credentials are fsspec's own (environment), never in the URL.
    """

    def __init__(self, url: str | None = None):
        self.url = (url or os.environ.get("GOLINEAR_BLOBS") or str(home() / "cells")).rstrip("/")
        self.is_local = "://" not in self.url or self.url.startswith("file://")
        self.root = Path(self.url.removeprefix("file://")) if self.is_local else home() / "cells"

    def folder(self, name: str) -> Path:
        """The local folder of an attempt; made when missing. Raises ValueError for a name that could leave the root."""
        if not SAFE.fullmatch(name):
            raise ValueError(f"blob name {name!r} is not of the form key/attempt")
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def put(self, name: str) -> str:
        """Upload the local folder of an attempt, checkpoints left out; returns its name, for the store."""
        folder = self.folder(name)
        if not self.is_local:
            filesystem, path = self._remote()
            for file in sorted(f for f in folder.rglob("*") if f.is_file()):
                relative = file.relative_to(folder).as_posix()
                if not relative.startswith(f"{CHECKPOINTS}/"):
                    target = f"{path}/{name}/{relative}"
                    filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                    filesystem.put_file(str(file), target)
        return name

    def put_checkpoint(self, name: str, step: Path) -> None:
        """Upload one checkpoint of an attempt and its curve; ``state.json`` last, which makes it complete. Older ones go."""
        filesystem, path = self._remote()
        there = f"{path}/{name}/{CHECKPOINTS}"
        filesystem.makedirs(f"{there}/{step.name}", exist_ok=True)
        if (curve := step.parent.parent / "curve.jsonl").exists():
            filesystem.put_file(str(curve), f"{path}/{name}/curve.jsonl")
        for file in sorted(step.iterdir(), key=lambda file: file.name == "state.json"):
            filesystem.put_file(str(file), f"{there}/{step.name}/{file.name}")
        for old in filesystem.glob(f"{there}/step-*"):
            if old.rsplit("/", 1)[-1] < step.name:
                filesystem.rm(old, recursive=True)

    def fetch_checkpoint(self, name: str, *, newer_than: str = "") -> bool:
        """Download the newest complete checkpoint of the cell's attempts, and its curve, into the folder of ``name``.

        ``newer_than``: a checkpoint's name (``step-00000123``) that is there already. True when one was fetched.
        """
        if self.is_local:
            return False
        filesystem, path = self._remote()
        found = filesystem.glob(f"{path}/{name.partition('/')[0]}/*/{CHECKPOINTS}/step-*/state.json")
        by_step = {state.split("/")[-2]: state.rsplit("/", 1)[0] for state in found}
        newest = max(by_step, default="")
        if newest <= newer_than:
            return False
        folder = self.folder(name)
        self._download(filesystem, by_step[newest], folder / CHECKPOINTS / newest)
        curve = f"{by_step[newest].rsplit('/', 2)[0]}/curve.jsonl"
        if filesystem.exists(curve):
            filesystem.get_file(curve, str(folder / "curve.jsonl"))
        return True

    def drop_checkpoints(self, key: str) -> None:
        """Remove the checkpoints of all attempts at a cell from the URL: it is published."""
        if not self.is_local:
            filesystem, path = self._remote()
            for there in filesystem.glob(f"{path}/{key}/*/{CHECKPOINTS}"):
                filesystem.rm(there, recursive=True)

    def fetch(self, name: str) -> Path:
        """The folder of a published attempt on this machine, downloaded when it is not here.

        It is whole or not there. Raises FileNotFoundError when it is neither here nor at the URL, ValueError when a file
        at the URL would leave the folder.
        """
        folder = self.folder(name)
        if any(folder.iterdir()):
            return folder
        if self.is_local:
            raise FileNotFoundError(
                f"published files of {name} are gone from {self.root}; golinear forget it and run again"
            )
        filesystem, path = self._remote()
        scratch = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
        try:
            if not self._download(filesystem, f"{path}/{name}", scratch):
                where = f"{shown(self.url)}; golinear forget it and run again"
                raise FileNotFoundError(f"published files of {name} are not at {where}")
            scratch.rename(folder)  # over the empty one
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder

    def _download(self, filesystem: Any, source: str, target: Path) -> int:
        """Every file below ``source``, one by one: what its name says must stay below ``target``. Number of files."""
        root = f"{source.strip('/')}/"
        files = filesystem.find(source)
        for file in files:
            relative = file.strip("/").removeprefix(root)
            if ".." in relative.split("/") or relative.startswith("/"):
                raise ValueError(f"{shown(self.url)} holds a file that would leave its folder: {relative}")
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(file, str(target / relative))
        return len(files)

    def delete(self, name: str) -> None:
        """Remove an attempt's files here and at the URL; missing ones are fine."""
        folder = self.folder(name)
        shutil.rmtree(folder)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
        if not self.is_local:
            filesystem, path = self._remote()
            if filesystem.exists(f"{path}/{name}"):
                filesystem.rm(f"{path}/{name}", recursive=True)

    def _remote(self) -> tuple[Any, str]:
        filesystem, path = fsspec.core.url_to_fs(self.url)
        filesystem.invalidate_cache()  # of its listings: other machines write there, too
        return filesystem, path
