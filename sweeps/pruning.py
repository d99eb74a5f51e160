"""Whether a training run has diverged, by its curve alone: for cells that are to be ended early on request. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

STEPS = 10  # whose mean loss is compared


class Divergence:
    """Watches the curve of one cell. It has diverged when its mean loss over ten steps is ``factor`` × its best so far.

    Raises ValueError for a factor that is not a finite number above 1.
    """

    def __init__(self, factor: float):
        if not math.isfinite(factor) or factor <= 1:
            raise ValueError(f"prune must be a finite number above 1 (times the best loss so far), not {factor!r}")
        self.factor = factor
        self.reason = ""  # why it has diverged; "" as long as it has not
        self._recent: deque[float] = deque(maxlen=STEPS)
        self._best = math.inf

    def see(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Take in the next rows of the curve (``loss``, ``tokens_seen``); returns ``reason``."""
        for row in rows:
            self._recent.append(float(row["loss"]))
            if len(self._recent) < STEPS or self.reason:
                continue
            mean = sum(self._recent) / STEPS
            self._best = min(self._best, mean)
            if mean > self.factor * self._best:
                where = f"at token {int(row['tokens_seen']):,}"
                self.reason = f"loss {mean:.3g} {where} is over {self.factor:g} times its best, {self._best:.3g}"
        return self.reason
