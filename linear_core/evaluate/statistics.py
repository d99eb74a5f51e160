"""Whether a difference is real, and how much of the base is kept over many tasks. Imports no torch.

Sources: McNemar 1947 (exact form), the paired bootstrap, and the tolerance-corrected win-and-tie rate of
arXiv 2603.15590.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from linear_core.evaluate.scores import Score

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``second − first`` on the same items. low, high: its 95% interval; p: of no difference at all, two-sided."""

    difference: float
    low: float
    high: float
    p: float
    items: int
    method: str

    @property
    def real(self) -> bool:
        """Whether the difference would come by chance less than once in twenty times."""
        return self.p < 0.05


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation over seeds; no spread (None) from a single one. Raises ValueError on none."""
    if not values:
        raise ValueError("no values to average")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def mcnemar(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p of two right-or-wrong results on the same items: a fair coin on the items where they differ."""
    _same_length(first, second)
    wins = sum(b > a for a, b in zip(first, second))
    losses = sum(a > b for a, b in zip(first, second))
    tosses = wins + losses
    tail = sum(math.comb(tosses, k) for k in range(min(wins, losses) + 1))
    return float(min(1, 2 * tail / 2**tosses)) if tosses < 1000 else _normal_p(wins, losses)


def _normal_p(wins: int, losses: int) -> float:
    """McNemar's test with continuity correction, where the binomial sum would be long."""
    return math.erfc(max(0, abs(wins - losses) - 1) / math.sqrt(2 * (wins + losses)))


def bootstrap(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """(low, high, p) of the mean difference ``second − first``: items drawn again and again with replacement, in pairs."""
    import numpy as np

    _same_length(first, second)
    difference = np.asarray(second, float) - np.asarray(first, float)
    chance = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    step = max(1, 2_000_000 // len(difference))
    for start in range(0, RESAMPLES, step):
        draws = chance.integers(len(difference), size=(min(step, RESAMPLES - start), len(difference)))
        means[start : start + len(draws)] = difference[draws].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    beyond = min(np.count_nonzero(means <= 0), np.count_nonzero(means >= 0))
    return float(low), float(high), float(min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1)))


def compare(first: Score, second: Score, *, seed: int = 0) -> Comparison:
    """Two scores of one metric, item by item. Right-or-wrong metrics: McNemar's p; others: the bootstrap's.

    Values are those of ``details["values"]`` (for perplexities mean log-likelihoods or losses an item). Raises
    ValueError when the scores are not of the same task, metric and items.
    """
    if first.task != second.task or first.metric != second.metric:
        raise ValueError(f"{first.task.label} {first.metric} and {second.task.label} {second.metric} are not the same measure")
    a, b = (s.details.get("values") for s in (first, second))
    if not a or not b:
        raise ValueError(f"{first.task.label}: a paired comparison needs both scores' per-item values")
    if first.source != second.source or len(a) != len(b):
        raise ValueError(f"{first.task.label}: not the same items ({first.source}, {len(a)}; {second.source}, {len(b)})")
    low, high, p = bootstrap(a, b, seed=seed)
    binary = {*a, *b} <= {0.0, 1.0}
    return Comparison(
        difference=math.fsum(b) / len(b) - math.fsum(a) / len(a), low=low, high=high,
        p=mcnemar(a, b) if binary else p, items=len(a), method="McNemar" if binary else "bootstrap",
    )  # fmt: skip


def compare_repeats(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Comparison:
    """Two settings on the same items, each run with one or more seeds: [seeds, items] of values on both sides.

    One seed each of right-or-wrong values: McNemar's p. Otherwise Welch's t with the paired items and each side's seeds
    as its parts: chance in the items and chance in the training both count. Raises ValueError when items differ.
    """
    import numpy as np
    from scipy.special import stdtr, stdtrit

    a, b = (np.atleast_2d(np.asarray(values, float)) for values in (first, second))
    _same_length(a[0], b[0])
    items = a.shape[1]
    paired = b.mean(0) - a.mean(0)
    parts = [(float(paired.var(ddof=1)) / items, items - 1)] if items > 1 else []
    parts += [(float(side.mean(1).var(ddof=1)) / len(side), len(side) - 1) for side in (a, b) if len(side) > 1]
    difference, variance = float(paired.mean()), sum(part for part, _ in parts)
    if not parts:
        return Comparison(difference=difference, low=-math.inf, high=math.inf, p=1.0, items=items, method="one item")
    if variance == 0:  # the same difference on every item and seed: how often would a coin fall on one side so often
        p = 1.0 if difference == 0 else min(1.0, 2.0 ** (1 - items))
        return Comparison(difference=difference, low=difference, high=difference, p=p, items=items, method="no spread")
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    half = float(stdtrit(freedom, 0.975)) * math.sqrt(variance)
    p = float(2 * stdtr(freedom, -abs(difference) / math.sqrt(variance)))
    method = f"paired items, {len(a)} and {len(b)} seeds"
    if len(a) == len(b) == 1 and set(np.unique(np.concatenate([a, b]))) <= {0.0, 1.0}:
        p, method = mcnemar(a[0].tolist(), b[0].tolist()), "McNemar"
    return Comparison(difference=difference, low=difference - half, high=difference + half, p=p, items=items, method=method)


def win_and_tie(base: Mapping[str, float], ours: Mapping[str, float], alpha: float = 0.0) -> float:
    """C_α: share of tasks where ours is at or above base − α (arXiv 2603.15590). Scores: higher is better, one unit.

    Raises ValueError when the two do not have the same tasks, there is none, or α is negative.
    """
    if alpha < 0:
        raise ValueError(f"alpha must be ≥ 0, not {alpha}")
    return sum(d <= alpha for d in _deficits(base, ours)) / len(base)


def smallest_alpha(base: Mapping[str, float], ours: Mapping[str, float], share: float = 0.5) -> float:
    """The smallest tolerance α at which C_α reaches ``share`` (one half: the critical tolerance of arXiv 2603.15590)."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    deficits = _deficits(base, ours)
    return max(0.0, deficits[math.ceil(share * len(deficits)) - 1])


def _deficits(base: Mapping[str, float], ours: Mapping[str, float]) -> list[float]:
    """What ours lacks to the base, smallest first; decimal noise in the last digits rounded away."""
    if base.keys() != ours.keys() or not base:
        raise ValueError(f"the same tasks are needed on both sides; they differ in {sorted(base.keys() ^ ours.keys())}")
    return sorted(round(base[task] - ours[task], 12) for task in base)


def _same_length(first: Sequence[float], second: Sequence[float]) -> None:
    if len(first) != len(second) or not len(first):
        raise ValueError(f"a paired comparison needs the same items on both sides, not {len(first)} and {len(second)}")
