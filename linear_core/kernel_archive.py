"""Compiled kernels and what autotuning chose, as one file for machines of one kind: compile once, unpack elsewhere.

``use`` gives Triton and inductor a folder named by ``key``: GPU, versions, Python. ``pack`` and ``unpack`` carry what may be
carried: Triton's kernels and choices, and inductor's choices. Inductor's graphs are pickles and stay: it makes them anew in
seconds. What is unpacked is code that runs here: take it from a place that only those can write who may run code here.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import sys
import tarfile
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from linear_core.models import cache_folder

PACKAGES = {"torch": "torch", "triton": "triton", "fla": "flash-linear-attention"}
FOLDERS = {"triton": "TRITON_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
GROUP = "__grp__"  # Triton's list of the files of a kernel, with absolute paths


def key() -> str:
    """What must be alike for kernels to be exchanged, as a name: ``nvidia-h200-torch2.11.0-…-cp312-x86_64``."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    parts = [gpu, *(f"{name}{_version(package)}" for name, package in PACKAGES.items())]
    parts += [
        f"cuda{torch.version.cuda or 'none'}",
        f"cp{sys.version_info[0]}{sys.version_info[1]}",
        platform.machine(),
    ]
    return re.sub(r"[^a-z0-9_.-]+", "-", "-".join(parts).lower())


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def use() -> dict[str, Path]:
    """Point Triton and inductor at folders of this key, unless the environment says where. Call before kernels are compiled."""
    home = cache_folder() / "kernels" / key()
    for name, variable in FOLDERS.items():
        os.environ.setdefault(variable, str(home / name))
    return folders()


def folders() -> dict[str, Path]:
    """Where compiled kernels are kept by this process, as far as the environment says; ``use`` makes it say so."""
    return {name: Path(os.environ[variable]) for name, variable in FOLDERS.items() if variable in os.environ}


def files() -> dict[str, Path]:
    """What ``pack`` takes, by its name in the archive; a kernel's list of files after its files."""
    found: dict[str, Path] = {}
    for name, folder in folders().items():
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name.startswith(GROUP), str(path))):
            relative = path.relative_to(folder)
            unfinished = any(part.startswith("tmp.") or part == "lock" for part in relative.parts)
            if path.is_file() and not unfinished and (name == "triton" or path.suffix == ".best_config"):
                found[f"{name}/{relative.as_posix()}"] = path
    return found


def pack(target: Path) -> int:
    """Write the archive; whole or not at all, whoever else writes it. Returns how many files are in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    chosen = files()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
        with tarfile.open(Path(scratch) / target.name, mode="w:gz", compresslevel=3) as archive:
            about = json.dumps({"key": key(), "files": len(chosen)}).encode()
            entry = tarfile.TarInfo("about.json")
            entry.size = len(about)
            archive.addfile(entry, io.BytesIO(about))
            for name, path in chosen.items():
                archive.add(path, name, recursive=False)
        os.replace(Path(scratch) / target.name, target)
    return len(chosen)


def unpack(source: Path) -> int:
    """Add what is not here yet. Returns how many files were added.

    Each file appears whole, and a kernel's list after its files, so that processes that compile meanwhile are not
    disturbed. Raises ValueError for another file, one of another key, and names that leave the folders.
    """
    here = folders() or use()
    try:
        with tarfile.open(source, mode="r:gz") as archive:
            return _unpack(archive, source, here)
    except (tarfile.TarError, EOFError, OSError, KeyError, json.JSONDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{source} is no archive of kernels: {error}") from error


def _unpack(archive: tarfile.TarFile, source: Path, here: dict[str, Path]) -> int:
    first = archive.next()
    content = archive.extractfile(first) if first is not None and first.name == "about.json" else None
    if content is None:
        raise ValueError(f"{source} is no archive of kernels (golinear kernels pack writes one)")
    if (theirs := json.load(content)["key"]) != key():
        raise ValueError(f"{source} has kernels of {theirs}; this machine is {key()}")
    added = 0
    for entry in archive:
        if entry is first:
            continue
        kind, _, rest = entry.name.partition("/")
        target = here.get(kind, Path()) / rest
        if kind not in here or not entry.isfile() or ".." in Path(rest).parts or Path(rest).is_absolute():
            raise ValueError(f"{source}: {entry.name!r} may not be unpacked; allowed: files under {', '.join(here)}")
        content = archive.extractfile(entry)
        if target.exists() or content is None:
            continue
        data = content.read()
        if target.name.startswith(GROUP):
            data = _moved(data, target.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix="tmp.", delete=False) as scratch:
            scratch.write(data)
        os.chmod(scratch.name, entry.mode & 0o755 | 0o600)
        os.replace(scratch.name, target)
        added += 1
    return added


def _moved(group: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, for the folder that they lie in now."""
    told = json.loads(group)
    told["child_paths"] = {name: str(folder / Path(path).name) for name, path in told["child_paths"].items()}
    return json.dumps(told).encode()
