"""Two ranks on two GPUs (NCCL) do what one GPU does, in bfloat16, with compiled layers; and how they end when one leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core import rank_worker
from tests.core.rank_worker import losses

TOGETHER = int(os.environ.get("GOLINEAR_RANK_TEST_SECONDS", "600"))  # all that the ranks do, compilation too
CLOSE = {"rel": 2e-3}  # of a loss; neighbouring steps of ``ce`` differ by 1 to 5 %

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(TOGETHER + 60),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """What one GPU and each of two ranks made. A rank of theirs is killed at last, one of another two fails."""
    folder, other = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("failing")
    with rank_worker.two(folder, "cuda", "killed") as started, rank_worker.two(other, "cuda", "fails alone") as failing:
        rank_worker.stopped_after_six(folder / "of_one", "cuda")
        one: dict[str, Any] = {name: rank_worker.run(folder / "one" / name, name, "cuda") for name in ("ce", "even")}
        one["measured"] = rank_worker.measured(rank_worker.randomised("cuda"), folder / "references")
        one |= {"killed": rank_worker.ended(started, TOGETHER), "fails": rank_worker.ended(failing, 60)}
    two = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    return folder, one, two


def test_two_gpus_train_as_one(world: Any) -> None:
    folder, _, two = world
    expected = losses(folder / "one" / "ce")
    assert losses(folder / "ranks" / "ce") == pytest.approx(expected, **CLOSE)
    assert max(expected) > 1.02 * min(expected), "other batches would be seen"
    assert [found["ce"]["result"]["ranks"] for found in two] == [2, 2]
    for name, parameter in two[0]["ce"]["parameters"].items():
        assert torch.equal(parameter, two[1]["ce"]["parameters"][name]), "the ranks never part"


def test_sharded_weights_change_nothing(world: Any) -> None:
    folder, _, two = world
    assert losses(folder / "sharded") == pytest.approx(losses(folder / "one" / "even"), rel=2e-2)
    assert [found["sharded"]["result"]["sharded"] for found in two] == [True, True]


def test_a_run_goes_on_with_another_number_of_gpus(world: Any) -> None:
    """One → two, and two → one."""
    folder, _, two = world
    expected = losses(folder / "one" / "ce")
    assert [found["resumed"]["result"]["resumed_from"] for found in two] == [6, 6]
    assert losses(folder / "of_one") == pytest.approx(expected, **CLOSE)
    assert [found["stopped"][0] for found in two] == [5, 5], "one rank was told to stop, both did"
    assert rank_worker.run(folder / "of_two", device="cuda")["result"]["resumed_from"] == 5
    assert losses(folder / "of_two") == pytest.approx(expected, **CLOSE)


def test_measuring_is_shared(world: Any) -> None:
    _, one, two = world
    for found in two:
        for name in ("measured", "sharded measured"):
            means = [[numbers.mean().item() for numbers in values] for values in (found[name], one["measured"])]
            sys.stderr.write(f"{name}: loss, agreement, divergence {means[0]} and {means[1]}\n")
            assert means[0] == pytest.approx(means[1], rel=3e-2, abs=2e-3)


@pytest.mark.parametrize("how", ["killed", "fails"])
def test_a_rank_that_leaves_ends_the_other_within_a_minute(world: Any, how: str) -> None:
    first, second, seconds = world[1][how]
    sys.stderr.write(f"a rank that {how}: exit statuses {first}, {second}, {seconds:.1f} s apart\n")
    assert second == (-9 if how == "killed" else 1) and first and seconds < 60
