"""Compiled kernels at a URL, one archive for each kind of GPU and versions: what one node compiled the others fetch.

``GOLINEAR_KERNELS`` names the place (a folder that nodes share, s3://…); without it every node compiles for itself. An
archive is put whole, so of two writers the last one stays; each adds to what was there when it began.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import fsspec

from linear_core import kernel_archive

log = logging.getLogger(__name__)


def place() -> str:
    """The URL of this environment; "" when kernels are not shared."""
    return os.environ.get("GOLINEAR_KERNELS", "").rstrip("/")


def fetch(url: str) -> int:
    """Unpack the archive of this machine's kind. Returns how many files it added: 0 where there is none.

    What fails costs a warning and a compilation, never a cell.
    """
    try:
        filesystem, path = fsspec.core.url_to_fs(f"{url}/{kernel_archive.key()}.tar.gz")
        if not filesystem.exists(path):
            return 0
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / "kernels.tar.gz"
            filesystem.get_file(path, str(local))
            added = kernel_archive.unpack(local)
    except Exception as error:  # noqa: BLE001 - every file system has its own kinds
        log.warning("kernels were not fetched from %s: %s", url, error)
        return 0
    log.info("%d files of compiled kernels fetched from %s", added, url)
    return added


def publish(url: str) -> int:
    """Put this machine's kernels there, with those that are there already. Returns the number of files; 0 when it failed."""
    fetch(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(f"{url}/{kernel_archive.key()}.tar.gz")
        with tempfile.TemporaryDirectory() as scratch:
            on_disk = "file" in filesystem.protocol
            local = Path(path) if on_disk else Path(scratch) / "kernels.tar.gz"
            number = kernel_archive.pack(local)
            if not on_disk:
                filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
                filesystem.put_file(str(local), path)  # object stores show a file when it is whole
    except Exception as error:  # noqa: BLE001 - every file system has its own kinds
        log.warning("kernels were not put at %s: %s", url, error)
        return 0
    log.info("%d files of compiled kernels put at %s", number, url)
    return number
