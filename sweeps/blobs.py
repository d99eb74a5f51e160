"""Files of published attempts by name, in a folder or at any fsspec URL (``s3://…``). Holds blobs, never locks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import fsspec

from sweeps.home import home

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
                if not relative.startswith("checkpoints/"):
                    target = f"{path}/{name}/{relative}"
                    filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                    filesystem.put_file(str(file), target)
        return name

    def fetch(self, name: str) -> Path:
        """The folder of a published attempt on this machine, downloaded when it is not here.

        Raises FileNotFoundError when it is neither here nor at the URL.
        """
        folder = self.folder(name)
        if any(folder.iterdir()):
            return folder
        if self.is_local:
            raise FileNotFoundError(
                f"published files of {name} are gone from {self.root}; golinear forget it and run again"
            )
        filesystem, path = self._remote()
        if not filesystem.exists(f"{path}/{name}"):
            raise FileNotFoundError(
                f"published files of {name} are not at {self.url}; golinear forget it and run again"
            )
        filesystem.get(f"{path}/{name}/", f"{folder}/", recursive=True)
        return folder

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
        return fsspec.core.url_to_fs(self.url)
