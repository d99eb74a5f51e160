"""fla's kernels without autotuning where the card is known: first use compiles one form of each kernel, not dozens.

``configs/<GPU name>/<kernel>.json`` holds what autotuning chose on such a card, in fla's own file form. ``collect``
makes these files from a Triton cache in which kernels were autotuned: ``linear_core.kernels.tune`` does all of it.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

CONFIGS = Path(__file__).parent / "configs"


def use_tuned_kernels() -> Path | None:
    """Point fla at this card's files, unless the environment already says otherwise; call before fla is imported.

    Returns the folder in use, or None when there is none for the card (fla then autotunes, some minutes, once a cache).
    """
    import torch

    folder = CONFIGS / folder_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if folder is None or not folder.is_dir():
        return None
    os.environ.setdefault("FLA_CONFIG_DIR", str(folder))
    os.environ.setdefault("FLA_CACHE_MODE", "fuzzy")  # sizes may differ, types not: others are autotuned
    tune_what_does_not_fit()
    take_the_nearest()
    return Path(os.environ["FLA_CONFIG_DIR"])


@cache
def tune_what_does_not_fit() -> None:
    """A configuration that was tuned for other sizes may want more shared memory than there is (float32 at D = 128 by a
    file made at D = 64): such a kernel is then autotuned, instead of ending the run. For this process, once."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    run = Autotuner.run

    @wraps(run)
    def fitting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except OutOfResources:
            for key in [key for key, config in self.cache.items() if config is self.best_config]:
                del self.cache[key]
            return run(self, *args, **kwargs)

    setattr(Autotuner, "run", fitting)  # noqa: B010 - a type checker minds the assignment


@cache
def take_the_nearest() -> None:
    """For sizes that were not tuned fla takes the file's first entry of the same types; the nearest sizes serve better.
    For this process, once."""
    from fla.ops.utils.cache import KernelConfigFile

    def nearest(self: Any, key: Any) -> dict[str, Any] | None:
        fitting = [e for e in (self.autotune_entries or {}).values() if key.fuzzy_matches(e.get("autotune_key"))]
        return min(fitting, key=lambda e: distance(key.autotune_key, e["autotune_key"]), default=None)

    setattr(KernelConfigFile, "lookup_fuzzy", nearest)  # noqa: B010 - a type checker minds the assignment


def distance(a: Any, b: Any) -> float:
    """Between two tuning keys of the same types: the sum of |log(size ratio)| over their numbers."""
    if isinstance(a, (list, tuple)):
        return sum(distance(x, y) for x, y in zip(a, b))
    if isinstance(a, (int, float)) and not isinstance(a, bool):
        return abs(math.log(max(a, 1) / max(b, 1)))
    return 0.0


@cache
def fla_module(name: str) -> ModuleType:
    """``fla.<name>``, with this card's configurations. Not by an import statement: that would make fla a requirement of
    exported model folders."""
    use_tuned_kernels()
    return import_module(f"fla.{name}")


def folder_name(gpu: str) -> str:
    """The name fla gives a card's folder: ``NVIDIA H200`` → ``NVIDIA_H200``."""
    return "".join(c if c.isalnum() else "_" for c in gpu).strip("_")


def collect(triton_cache: Path, gpu: str, configs: Path = CONFIGS) -> list[Path]:
    """Write the fastest configuration of every kernel and key in a Triton cache, beside what is there already."""
    from fla.ops.utils.cache import AutotuneKey

    best: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for file in sorted(triton_cache.rglob("*.autotune.json")):
        tuned = json.loads(file.read_text())
        config, _ = min(tuned["configs_timings"], key=lambda pair: pair[1][0])
        keep = {name: config[name] for name in ("kwargs", "num_warps", "num_ctas", "num_stages", "maxnreg")}
        kernel = file.name.removesuffix(".autotune.json")
        best[kernel][AutotuneKey.key_hash(tuned["key"])] = {"autotune_key": tuned["key"], "config": keep}
    written = []
    for kernel, entries in best.items():
        path = configs / folder_name(gpu) / f"{kernel}.json"
        if path.exists():
            entries = {**json.loads(path.read_text())["autotune_entries"], **entries}
        first = next(iter(entries.values()))["config"]
        content = {"kernel_name": kernel, "default_config": first, "autotune_entries": dict(sorted(entries.items()))}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        written.append(path)
    return written
