"""Checkpoints at the URL of the blobs, so that another node can go on where this one stopped. Imports no torch.

With a local root (a shared folder, or one machine) there is nothing to do: attempts see each other's folders.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeps.blobs import CHECKPOINTS, Blobs

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0  # between looks for a new checkpoint


class Mirror:
    """Uploads the newest checkpoint of an attempt whenever there is a new one. ``tokens``: seen in the newest uploaded."""

    def __init__(self, blobs: Blobs, name: str):
        self.blobs, self.name, self.folder = blobs, name, blobs.folder(name)
        self.tokens = 0
        self._uploaded = ""

    def update(self) -> None:
        """Upload what is new; what fails is tried again the next time, since training must not fail of it."""
        newest = max((self.folder / CHECKPOINTS).glob("step-*"), default=None)
        if newest is None or newest.name == self._uploaded:
            return
        try:
            tokens = json.loads((newest / "state.json").read_text())["tokens_seen"]
            self.blobs.put_checkpoint(self.name, newest)
        except Exception as error:  # noqa: BLE001 - every file system has its own kinds
            log.warning("checkpoint %s is not at %s yet: %s", newest.name, self.blobs.url, error)
            return
        self._uploaded, self.tokens = newest.name, tokens


@contextmanager
def mirrored(blobs: Blobs, name: str) -> Iterator[Mirror | None]:
    """Keep the checkpoints of attempt ``name`` at the URL while it trains, the last one included; None for a local root."""
    if blobs.is_local:
        yield None
        return
    mirror, done = Mirror(blobs, name), threading.Event()

    def keep() -> None:
        while not done.wait(LOOK_SECONDS):
            mirror.update()

    thread = threading.Thread(target=keep, name=f"mirror {name}", daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        done.set()
        thread.join()
        mirror.update()


def saved_tokens(folder: Path) -> int:
    """Tokens seen in the newest checkpoint of an attempt's folder; 0 without one."""
    newest = max((folder / CHECKPOINTS).glob("step-*/state.json"), default=None)
    try:
        return json.loads(newest.read_text())["tokens_seen"] if newest else 0
    except OSError:  # replaced by a newer one a moment ago
        return 0
