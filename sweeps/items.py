"""Per-item results as short text, so that the store alone can compare two cells item by item. Imports no torch.

Right-or-wrong values take a bit each, others a float32: 14,042 items of MMLU are 2.3 kB.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from linear_core.evaluate.scores import Score
from linear_core.evaluate.tasks import TASKS

BITS, FLOATS = "bits", "float32"


def pack(values: Sequence[float]) -> str:
    """``bits:7:…`` or ``float32:7:…``: the kind, the number of values, and the values in base64."""
    array = np.asarray(values, float)
    if np.isin(array, (0.0, 1.0)).all():
        kind, raw = BITS, np.packbits(array.astype(bool)).tobytes()
    else:
        kind, raw = FLOATS, array.astype("<f4").tobytes()
    return f"{kind}:{len(array)}:{base64.b64encode(raw).decode()}"


def unpack(text: str) -> np.ndarray:
    """The values [items] float64 that ``pack`` was given, to float32. Raises ValueError for other text."""
    try:
        kind, count, coded = text.split(":")
        raw, length = base64.b64decode(coded, validate=True), int(count)
        if len(raw) != {BITS: (length + 7) // 8, FLOATS: 4 * length}[kind]:
            raise ValueError(f"{len(raw)} bytes do not hold {length} values")
    except (ValueError, KeyError) as error:
        raise ValueError(f"not packed items, {text[:40]!r}: {error}") from error
    if kind == BITS:
        return np.unpackbits(np.frombuffer(raw, np.uint8), count=length).astype(float)
    return np.frombuffer(raw, "<f4").astype(float)


def kept(score: Score) -> dict[str, Any]:
    """What the store keeps of a score's details: the values of a task's main metric, and which items they are of; of
    diagnostics the errors by layer and token."""
    if "map" in score.details:
        return {"map": score.details["map"]}
    task = TASKS.get(score.task.name)
    values, names = score.details.get("values"), score.details.get("items")
    if task is None or score.metric != task.metrics[0] or score.value is None or not values or not names:
        return {}
    digest = hashlib.sha256(json.dumps(names, default=str).encode()).hexdigest()[:16]
    return {"items": digest, "values": pack(values)}


def of(score: Score) -> dict[str, Any]:
    """A stored score's digest of items and packed values, None where it has none (stored by an older version)."""
    return {name: score.details.get(name) for name in ("items", "values")}
