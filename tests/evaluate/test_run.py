"""Whole tasks: lm-eval's own numbers, data in place, samples, flags, and what a score says about itself."""

import copy
import random

import numpy as np
import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from linear_core.convert import convert
from linear_core.evaluate import ruler
from linear_core.evaluate.measures import Measured, load_tasks
from linear_core.evaluate.run import evaluate_task, flags
from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.evaluate.tasks import RULER, TASKS, sample_items
from linear_core.recipe import Recipe


def by_hflm(model, tokenizer, task):
    """lm-eval's own model on the same items: (aggregated results, log-likelihoods or texts of every item)."""
    loaded = load_tasks(task, tokenizer)
    chosen = sample_items({name: len(t.eval_docs) for name, t in loaded.items()}, task.limit, task.seed)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    out = evaluate(lm=lm, task_dict={"tasks": {n: loaded[n] for n in chosen}}, samples=chosen, bootstrap_iters=0)
    return out["results"], [[r[0] for r in row["resps"]] for name in chosen for row in out["samples"][name]]


def assert_equal_items(ours, theirs, tolerance=1e-4):
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a[1] == b[1] and abs(a[0] - b[0]) <= tolerance) if isinstance(a, tuple) else a == b


def test_lambada_is_lm_evals_number_item_by_item(data_folder, tiny, tokenizer):
    task = TaskSpec(name="lambada_openai", limit=12, seed=1)
    results, items = by_hflm(tiny, tokenizer, task)
    acc, perplexity = evaluate_task(tiny, tokenizer, task)
    assert_equal_items(acc.details["responses"], items)
    assert acc.value == results["lambada_openai"]["acc,none"] and acc.samples == 12
    assert perplexity.value == pytest.approx(results["lambada_openai"]["perplexity,none"], rel=1e-5)
    assert acc.source.startswith("lambada_test.jsonl.gz sha256:") and acc.harness.startswith("lm-eval 0.")
    assert Score.from_dict(acc.to_dict()) == acc


def test_mmlu_weighs_documents_and_spreads_a_limit(data_folder, tiny, tokenizer):
    task = TaskSpec(name="mmlu", limit=9, shots=1)
    results, items = by_hflm(tiny, tokenizer, task)
    (score,) = evaluate_task(tiny, tokenizer, task)
    assert_equal_items(score.details["responses"], items)
    assert score.samples == 9 and len(results) >= 7, "nine items of seven subjects at least"
    counts = {name: sum(i.startswith(f"{name}:") for i in score.details["items"]) for name in results}
    assert score.value == pytest.approx(sum(results[n]["acc,none"] * c for n, c in counts.items()) / 9)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_do_not_depend_on_batch_size(data_folder, tiny, tokenizer, batch_size):
    task = TaskSpec(name="lambada_openai", limit=7)
    auto, given = (evaluate_task(tiny, tokenizer, task, batch_size=b)[0] for b in ("auto", batch_size))
    assert auto.value == given.value
    assert_equal_items(auto.details["responses"], given.details["responses"], 1e-5)


@pytest.mark.parametrize("recipe", [None, "gdn 56+8"])
def test_smollm2_is_lm_evals_number_item_by_item(data_folder, smollm2, recipe):
    model, tokenizer = smollm2
    tasks = [TaskSpec(name="lambada_openai", limit=3), TaskSpec(name="mmlu", limit=2, shots=1)]
    if recipe:
        from linear_core.convert import unconvert

        model, tasks = convert(model, Recipe.parse(recipe)), tasks[:1]
    try:
        for task in tasks:
            assert_equal_items(
                evaluate_task(model, tokenizer, task)[0].details["responses"], by_hflm(model, tokenizer, task)[1]
            )
    finally:
        if recipe:
            unconvert(model)


@pytest.mark.parametrize("name", RULER)
def test_every_ruler_task_makes_its_samples_at_its_shortest_length(data_folder, smollm2, name):
    tokenizer = smollm2[1]
    length = TASKS[name].min_length
    rows, other = (ruler.samples(TaskSpec(name=name, length=length, limit=2, seed=s), tokenizer) for s in (0, 1))
    assert len(rows) == 2 and [r["input"] for r in other] != [r["input"] for r in rows]
    for row in rows:
        assert row["max_length"] == length and row["outputs"] and row["input"]
        assert len(tokenizer(row["input"])["input_ids"]) <= length


@pytest.mark.parametrize("name", ["vt", "cwe"])
def test_a_ruler_prompt_that_cannot_fit_is_refused_and_not_tried_for_ever(tokenizer, name):
    with pytest.raises(ValueError, match=r"takes .* tokens"):
        ruler.samples(TaskSpec(name=name, length=1024, limit=1), tokenizer)


def test_needles_are_lm_evals_own(tokenizer, monkeypatch):
    """Seed 0 is lm-eval's stream: what its generator makes when the harness seeds it."""
    from lm_eval.tasks.ruler import niah_utils

    ours = ruler.samples(TaskSpec(name="niah_single_1", length=512, limit=5), tokenizer)
    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda *a: tokenizer)
    random.seed(0)
    np.random.seed(1234)
    theirs = niah_utils.niah_single_1(max_seq_lengths=[512], tokenizer="any")["test"]
    assert 400 < len(theirs) <= 500
    assert ours == [theirs[i] for i in range(5)]


def test_making_samples_leaves_the_global_random_streams_alone(tokenizer):
    random.seed(7)
    expected = random.random()
    random.seed(7)
    ruler.samples(TaskSpec(name="niah_single_1", length=600, limit=1, seed=3), tokenizer)
    assert random.random() == expected


def test_a_needle_task_runs_at_any_length_and_never_says_minus_one(tiny, tokenizer):
    (score,) = evaluate_task(tiny, tokenizer, TaskSpec(name="niah_single_1", length=777, limit=2))
    assert score.value == 0.0 and score.samples == 2
    assert "all-zero" in score.flags and score.source == "generated, seed 0"


def test_a_prompt_beyond_the_models_positions_is_a_missing_score(tiny, tokenizer, monkeypatch):
    monkeypatch.setattr(tiny.config, "max_position_embeddings", 500)
    (score,) = evaluate_task(tiny, tokenizer, TaskSpec(name="niah_single_1", length=777, limit=2))
    assert score.value is None and "500 positions" in score.reason


def measured(values, predictions=()):
    mean = sum(values) / len(values)
    stderr = (torch.tensor(values).std() / len(values) ** 0.5).item()
    return Measured("acc", mean, stderr, len(values), values, {"predictions": list(predictions)})


@pytest.mark.parametrize(
    ("task", "result", "expected"),
    [
        ("mmlu", measured([0.0, 0, 0, 1] * 30), ("chance-level",)),
        ("mmlu", measured([0.0, 1, 1, 1] * 30), ()),
        ("mmlu", measured([0.0, 1, 1, 1] * 30, [2] * 120), ("constant",)),
        ("niah_single_1", measured([0.0] * 8), ("all-zero",)),
        ("niah_single_1", measured([1.0] * 8), ()),
        ("lambada_openai", measured([1.0] * 8), ("constant",)),
    ],
)
def test_doubtful_results_are_flagged(task, result, expected):
    assert flags(TASKS[task], result) == expected


@pytest.mark.parametrize("recipe", ["gdn 4+2", "gdn 4+2 list:0", ""])
def test_speed_is_measured_of_a_model_as_it_stands(tiny, tokenizer, recipe):
    """Full attention's cache grows with the length, a linearized one's does not, and kept layers are in between."""
    model = convert(copy.deepcopy(tiny), Recipe.parse(recipe)) if recipe else tiny
    short, long = (evaluate_task(model, tokenizer, TaskSpec(name="latency", length=n)) for n in (16, 48))
    assert [s.metric for s in short] == list(TASKS["latency"].metrics) and all(s.value > 0 for s in (*short, *long))
    growth = long[2].value / short[2].value
    assert growth == pytest.approx(1) if recipe == "gdn 4+2" else 1 < growth <= 3
