"""How busy a machine is, under the names of MLflow's page of system metrics. GPUs only where pynvml is. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any

import psutil

MB = 1e6  # MLflow's megabyte


def sample() -> dict[str, float]:
    """Utilisation in percent, memory in megabytes, power in watts, of this machine and this process, now."""
    memory = psutil.virtual_memory()
    found = {
        "cpu_utilization_percentage": psutil.cpu_percent(),  # since the last sample
        "system_memory_usage_megabytes": memory.used / MB,
        "system_memory_usage_percentage": memory.percent,
        "process_memory_megabytes": psutil.Process().memory_info().rss / MB,
    }
    for number, card in enumerate(_cards()):
        found |= {f"gpu_{number}_{name}": value for name, value in _of_card(*card).items()}
    return {f"system/{name}": float(value) for name, value in found.items()}


@cache
def _cards() -> list[tuple[Any, Any]]:
    """(pynvml, handle) of every card that this process may use; none without the library or a driver."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = range(len(handles)) if visible is None else [int(i) for i in visible.split(",") if i.strip().isdigit()]
    return [(pynvml, handles[i]) for i in chosen if i < len(handles)]


def _of_card(pynvml: Any, handle: Any) -> dict[str, float]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "utilization_percentage": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_usage_megabytes": memory.used / MB,
        "memory_usage_percentage": 100 * memory.used / memory.total,
        "power_usage_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
