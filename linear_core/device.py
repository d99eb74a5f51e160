"""The machine's GPUs as nvidia-smi names them: known without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache


@cache
def nvidia_gpus() -> tuple[tuple[str, ...], float]:
    """(names of the GPUs, bytes of the smallest one's memory); none: ((), 0.0)."""
    if shutil.which("nvidia-smi") is None:
        return (), 0.0
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line] if done.returncode == 0 else []
    names = tuple(name.strip() for name, _ in rows)
    return names, min((float(mib) * (1 << 20) for _, mib in rows), default=0.0)


def device_name() -> str:
    """What work runs on here: the first GPU, else the CPU cores."""
    names, _ = nvidia_gpus()
    return names[0] if names else f"{os.cpu_count()} CPU cores"
