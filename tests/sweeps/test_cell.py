"""Identity: the same science has the same key for ever, and anything that could change a result changes it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from sweeps.cell import Cell, Placement, canonical, diff, digest

CELL = Cell(base="smollm2-135m", revision="rev1", recipe=Recipe.parse("gdn 56+8"), train=TrainSettings(), data="text1")


def test_keys_are_these_for_ever() -> None:
    """If this fails, stored results are lost to everyone: bump a SCIENCE version instead of changing the form."""
    assert CELL.train_key == "smollm2-135m-gdn-56-8-s1-1e31fedaa09947b0"
    task = TaskSpec(name="niah_single_1", length=512, limit=8)
    score_key = CELL.score_key(task, source="self-made", harness="lm-eval 0.4.13")
    assert score_key == "smollm2-135m-gdn-56-8-s1-niah_single_1-512-7b375fe24e2f35f6"
    assert CELL.base_of().train_key == "smollm2-135m-base-5efc21ef88693139"


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
nested = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def shuffled(value: object) -> object:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), nested))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_digest_does_not_depend_on_order_or_a_round_trip(inputs: dict[str, object]) -> None:
    assert digest(inputs) == digest(shuffled(inputs))  # type: ignore[arg-type]
    assert digest(inputs) == digest(json.loads(json.dumps(canonical(inputs))))
    assert digest({**inputs, "one more": 1}) != digest(inputs)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=1e-12, max_value=1e3))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_the_next_float_is_another_cell(rate: float) -> None:
    def key(value: float) -> str:
        return dataclasses.replace(CELL, train=TrainSettings(learning_rate=value)).train_key

    assert key(rate) != key(math.nextafter(rate, math.inf))
    assert key(rate) == key(float(repr(rate)))


@pytest.mark.parametrize("value", [{1, 2}, object(), b"x", math.nan, math.inf, {1: "a"}, complex(1), range(3)])
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"inputs\.here\[0\]"):
        canonical({"here": [value]}, "inputs")


def test_same_science_same_key() -> None:
    def with_train(**values: object) -> str:
        return dataclasses.replace(CELL, train=TrainSettings(**values)).train_key  # type: ignore[arg-type]

    assert with_train(learning_rate=2e-3) == CELL.train_key, "the default rate written out"
    assert with_train(objective="ce:10240000") == CELL.train_key
    for field, value in (("lora_rank", 4), ("lora_alpha", 8), ("conv_kernel", 4)):
        recipe = dataclasses.replace(CELL.recipe, **{field: value})
        assert dataclasses.replace(CELL, recipe=recipe).train_key == CELL.train_key, f"{field} is not read here"
    assert Cell.base_model("m", "r").train_key == dataclasses.replace(CELL, base="m", revision="r").base_of().train_key
    assert not {f.name for f in dataclasses.fields(Placement)} & {f.name for f in dataclasses.fields(Cell)}


CHANGES = [
    *({"recipe": dataclasses.replace(CELL.recipe, **{k: v})} for k, v in (
        ("mechanism", "gla"), ("window", 64), ("sinks", 4), ("adaptation", "conv"), ("merge", "mass"),
        ("softmax_layers", "uniform:0.2"), ("gate_bias", 3.0), ("learned_read_scale", True))),
    *({"train": TrainSettings(**{k: v})} for k, v in (
        ("tokens", 4096), ("sequence_length", 256), ("batch_size", 2), ("learning_rate", 1e-3), ("warmup_steps", 10),
        ("objective", "kl"), ("weight_decay", 0.1), ("clip_norm", 2.0), ("beta1", 0.8), ("beta2", 0.95),
        ("final_learning_rate", 0.1), ("isolate_documents", True))),
    {"base": "other"}, {"revision": "rev2"}, {"data": "text2"}, {"seed": 2},
]  # fmt: skip


def test_every_change_that_could_change_a_result_changes_the_key_and_is_named() -> None:
    changed = [dataclasses.replace(CELL, **change) for change in CHANGES]
    assert len({CELL.train_key, *(cell.train_key for cell in changed)}) == len(CHANGES) + 1
    assert all(diff(CELL, cell) for cell in changed)
    slower = dataclasses.replace(CELL, train=TrainSettings(learning_rate=1e-3))
    assert diff(CELL, slower) == ["train.learning_rate 0.002 → 0.001"]
    assert diff(CELL, CELL) == []


def test_a_folder_is_known_by_its_weights_wherever_it_lies() -> None:
    here, there = (dataclasses.replace(CELL, base=base) for base in ("/disk1/mymodel", "/disk2/copy"))
    assert here.train_key == there.train_key and here.label == "mymodel gdn 56+8 s1"
    assert "disk" not in here.train_key
    assert dataclasses.replace(here, revision="rev2").train_key != here.train_key


def test_seeds_are_repeats_of_one_setting() -> None:
    again = dataclasses.replace(CELL, seed=7)
    assert again.setting == CELL.setting and again.train_key != CELL.train_key
    assert dataclasses.replace(CELL, data="text2").setting != CELL.setting


def test_score_key_depends_on_all_of_the_task_and_where_it_came_from() -> None:
    task = TaskSpec(name="mmlu", limit=10)
    changes = ({"limit": 11}, {"shots": 0}, {"seed": 1}, {"length": 9})
    others = [dataclasses.replace(task, **change) for change in changes]
    keys = [CELL.score_key(task), *(CELL.score_key(other) for other in others)]
    keys += [CELL.score_key(task, source="hub"), CELL.score_key(task, harness="lm-eval 1")]
    keys += [dataclasses.replace(CELL, seed=2).score_key(task)]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[a-z0-9_-]+-[0-9a-f]{16}", key) for key in keys)


def test_names_never_leave_the_alphabet_or_grow_without_bound() -> None:
    recipe = dataclasses.replace(CELL.recipe, softmax_layers="list:" + ",".join(map(str, range(60))))
    cell = dataclasses.replace(CELL, base="../Weird Näme/x.1", recipe=recipe)
    assert re.fullmatch(r"[a-z0-9_-]+", cell.train_key) and len(cell.train_key) <= 120


def test_bad_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="seed"):
        dataclasses.replace(CELL, seed=-1)
    with pytest.raises(ValueError, match="base model"):
        dataclasses.replace(CELL, train=None)
    with pytest.raises(ValueError, match="pinned"):
        _ = dataclasses.replace(CELL, revision="").train_key
    with pytest.raises(ValueError, match="num_gpus"):
        Placement(num_gpus=-1)


def test_round_trip_and_no_torch() -> None:
    assert Cell.from_dict(json.loads(json.dumps(CELL.to_dict()))) == CELL
    modules = ", ".join(f"sweeps.{name}" for name in ("cell", "grids", "plan", "store", "tables", "render", "tracking"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
