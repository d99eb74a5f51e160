"""Hand-computed cases of the statistics."""

import math

import numpy as np
import pytest

from linear_core.evaluate import statistics as s
from linear_core.evaluate.scores import Score, TaskSpec


def score(values, *, source="file", metric="acc", name="mmlu"):
    mean = sum(values) / len(values)
    return Score(task=TaskSpec(name=name), metric=metric, value=mean, source=source, details={"values": values})


def test_mean_and_spread():
    assert s.mean_and_spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert s.mean_and_spread([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="no values"):
        s.mean_and_spread([])


def test_mcnemar_is_the_binomial_of_the_items_that_differ():
    first, second = [1, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0, 1]
    # five losses, one win: 2 · (C(6,0) + C(6,1)) / 2⁶
    assert s.mcnemar(first, second) == pytest.approx(14 / 64)
    assert s.mcnemar(first, first) == 1.0
    many = s.mcnemar([1] * 600 + [0] * 500, [0] * 600 + [1] * 500)
    exact = 2 * sum(math.comb(1100, k) for k in range(501)) / 2**1100
    assert many == pytest.approx(exact, rel=0.02)


def test_the_bootstrap_sees_a_constant_difference_and_not_noise():
    assert s.bootstrap([0.0] * 20, [1.0] * 20)[:2] == (1.0, 1.0)
    assert s.bootstrap([0.0] * 20, [1.0] * 20)[2] < 0.001
    low, high, p = s.bootstrap([0.0, 1.0] * 20, [1.0, 0.0] * 20)
    assert low < 0 < high and p > 0.5
    assert s.bootstrap([0.0, 1.0] * 20, [1.0, 0.0] * 20) == (low, high, p), "seeded"


def test_comparing_two_scores():
    worse, better = score([0.0] * 30 + [1.0] * 10), score([0.0] * 15 + [1.0] * 25)
    found = s.compare(worse, better)
    assert found.difference == pytest.approx(15 / 40) and found.method == "McNemar" and found.real
    assert found.low < found.difference < found.high
    losses = s.compare(score([2.0, 3.0, 2.5], metric="perplexity"), score([2.1, 2.9, 2.5], metric="perplexity"))
    assert losses.method == "bootstrap" and not losses.real


def test_scores_of_other_items_are_not_compared():
    with pytest.raises(ValueError, match="not the same measure"):
        s.compare(score([1.0]), score([1.0], metric="acc_norm"))
    with pytest.raises(ValueError, match="not the same items"):
        s.compare(score([1.0]), score([1.0], source="hub"))
    with pytest.raises(ValueError, match="per-item"):
        s.compare(score([1.0]), Score(task=TaskSpec(name="mmlu"), metric="acc", reason="no data"))


def test_win_and_tie_with_tolerance():
    base = {"a": 0.50, "b": 0.60, "c": 0.70, "d": 0.80}
    ours = {"a": 0.52, "b": 0.60, "c": 0.67, "d": 0.70}
    assert s.win_and_tie(base, ours) == 0.5
    assert s.win_and_tie(base, ours, 0.03) == 0.75
    assert s.win_and_tie(base, ours, 0.0299) == 0.5
    assert s.smallest_alpha(base, ours) == 0.0
    assert s.smallest_alpha(base, ours, 0.75) == pytest.approx(0.03)
    assert s.smallest_alpha(base, ours, 1.0) == pytest.approx(0.10)
    with pytest.raises(ValueError, match="'d'"):
        s.win_and_tie(base, {"a": 1, "b": 1, "c": 1})


def test_repeats_count_luck_in_items_and_in_training():
    """Without a difference p is below 0.05 about once in twenty times; a spread over seeds alone is no difference."""
    chance = np.random.default_rng(0)
    found = []
    for _ in range(200):
        items = chance.normal(size=60)  # the same items for both, with luck of their own for every seed and side
        a, b = (items + chance.normal(0, 0.5, (3, 60)) + chance.normal(0, 0.3, (3, 1)) for _ in range(2))
        found.append(s.compare_repeats(a, b).p)
    assert 0.01 <= sum(p < 0.05 for p in found) / 200 <= 0.1
    one, other = [0.0] * 20 + [1.0] * 80, [1.0] * 98 + [0.0] * 2
    assert s.compare_repeats([one], [other]).p == s.mcnemar(one, other) and s.compare_repeats([one], [other]).method == "McNemar"
    seeds = [[v] * 50 for v in (0.2, 0.5, 0.8)]
    assert s.compare_repeats(seeds, [[v + 0.1] * 50 for v in (0.2, 0.5, 0.8)]).p > 0.5
    assert s.compare_repeats([[0.0] * 8], [[1.0] * 8]).p == pytest.approx(2 / 2**8)
    same = s.compare_repeats([[0.5] * 8], [[0.5] * 8])
    assert (same.difference, same.p) == (0.0, 1.0)
    with pytest.raises(ValueError, match="the same items"):
        s.compare_repeats([[1.0]], [[1.0, 0.0]])
