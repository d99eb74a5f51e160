"""The registry and the sample that a limit takes."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linear_core.evaluate.run import check_task
from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import GROUPS, TASKS, sample_items


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "mmlu2"}, "mmlu, piqa"),
        ({"name": "mmlu", "limit": 0}, "limit must be a whole number ≥ 1"),
        ({"name": "mmlu", "limit": 2.5}, "not 2.5"),
        ({"name": "mmlu", "limit": True}, "not True"),
        ({"name": "mmlu", "shots": -1}, "shots must be a whole number ≥ 0"),
        ({"name": "mmlu", "length": 4096}, "has no length"),
        ({"name": "niah_single_1"}, "needs a prompt length"),
        ({"name": "vt", "length": 512}, "from length 1024 on"),
        ({"name": "perplexity", "limit": 1}, "at least 2"),
        ({"name": "agreement", "shots": 5}, "has no shots"),
        ({"name": "diagnostics", "length": 4096}, "at most 2048"),
        ({"name": "latency"}, "write latency@2048"),
        ({"name": "latency", "length": 64, "limit": 3}, "and nothing else"),
    ],
)
def test_a_task_that_cannot_run_is_refused_with_what_is_allowed(fields, said):
    with pytest.raises(ValueError, match=said):
        check_task(TaskSpec(**fields))


def test_every_group_names_known_tasks():
    for names in GROUPS.values():
        assert set(names) <= set(TASKS)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 120), st.integers(0, 5))
def test_a_limit_takes_that_many_items_in_proportion(sizes, limit, seed):
    parts = {f"part{i}": size for i, size in enumerate(sizes)}
    total = sum(sizes)
    taken = sample_items(parts, limit, seed)
    assert taken == sample_items(parts, limit, seed)
    assert sum(map(len, taken.values())) == min(limit, total)
    for name, items in taken.items():
        assert items == sorted(set(items))
        assert 0 <= items[0] and items[-1] < parts[name]
        assert abs(len(items) - min(limit, total) * parts[name] / total) < 2


def test_another_seed_takes_other_items_and_none_is_left_out_for_ever():
    taken = {i for seed in range(60) for i in sample_items({"all": 20}, 3, seed)["all"]}
    assert taken == set(range(20))


def test_planning_needs_no_torch():
    code = (
        "import sys, linear_core.evaluate.run as r; from linear_core.evaluate.scores import TaskSpec;"
        "t = TaskSpec(name='niah_single_1', length=512); r.check_task(t); r.data_source(t);"
        "sys.exit(bool({'torch', 'lm_eval', 'datasets', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
