"""Where a result came from: commit, versions, hardware. Never part of a key. Imports no torch of its own."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "golinear",
    "torch",
    "triton",
    "flash-linear-attention",
    "transformers",
    "lm_eval",
    "datasets",
    "peft",
    "ray",
    "prefect",
    "mlflow",
)


def provenance(device: str = "cpu") -> dict[str, Any]:
    """commit, dirty, versions, environment, host, hardware, device and UTC time, as plain values."""
    return {
        **commit(),
        "versions": versions(),
        "environment": environment(),
        "host": platform.node(),
        "platform": platform.platform(),
        "hardware": hardware(device),
        "device": device,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def versions() -> dict[str, str]:
    """Versions of the packages that can change a number, and of Python."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def environment() -> str:
    """16 hex over the name and version of every installed package: two runs that share it ran the same code."""
    installed = sorted({f"{found.metadata['Name']}=={found.version}".lower() for found in distributions()})
    return hashlib.sha256("\n".join(installed).encode()).hexdigest()[:16]


@cache
def commit() -> dict[str, Any]:
    """The commit of this source tree and whether it was changed since; GOLINEAR_COMMIT on a machine without git."""
    root = Path(__file__).resolve().parent.parent
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return {"commit": os.environ.get("GOLINEAR_COMMIT", "unknown"), "dirty": False}
    return {"commit": head, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def hardware(device: str) -> str:
    """The card's name, else the number of CPU cores."""
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.device(device))
    return f"{os.cpu_count()} CPU cores"
