"""Two ranks on the CPU (gloo) do what one process does: batches, losses, parameters, answers; sharded weights too."""

import pytest
import torch

from tests.core import rank_worker
from tests.core.rank_worker import losses


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What one process and each of two ranks made, and how the ranks ended."""
    folder = tmp_path_factory.mktemp("ranks")
    with rank_worker.two(folder, "cpu", "killed") as started:
        rank_worker.stopped_after_six(folder / "of_one")
        one = rank_worker.straight(folder / "one", "cpu")
        even = rank_worker.run(folder / "even", "even")
        end = rank_worker.ended(started, 250)
    two = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    return folder, {**one, "even": even, "end": end}, two


@pytest.mark.parametrize("what", ["ce", "chain"])
def test_two_ranks_train_as_one_process(world, what):
    """Same batches, the loss of all tokens, the same parameters; the last step has one sequence for two ranks."""
    folder, one, two = world
    assert losses(folder / "ranks" / what) == pytest.approx(losses(folder / "one" / what), rel=1e-5)
    for found in two:
        torch.testing.assert_close(found[what]["parameters"], one[what]["parameters"], rtol=1e-3, atol=1e-4)
        expected = {**one[what]["result"], "ranks": 2, "micro_batch": 2}
        for name in ("steps", "tokens_seen", "ranks", "micro_batch", "accumulation"):
            assert found[what]["result"][name] == expected[name], name
    for name, parameter in two[0][what]["parameters"].items():
        assert torch.equal(parameter, two[1][what]["parameters"][name]), "the ranks never part"


def test_sharded_weights_change_nothing(world):
    folder, one, two = world
    assert losses(folder / "sharded") == pytest.approx(losses(folder / "even"), rel=1e-5)
    for found in two:
        assert found["sharded"]["result"]["sharded"]
        torch.testing.assert_close(found["sharded"]["parameters"], one["even"]["parameters"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found["sharded"]["logits"], one["even"]["logits"], rtol=1e-3, atol=1e-3)


def test_a_run_goes_on_with_another_number_of_ranks(world):
    folder, one, two = world
    for found in two:
        assert found["resumed"]["result"]["resumed_from"] == 6
        torch.testing.assert_close(found["resumed"]["parameters"], one["ce"]["parameters"], rtol=1e-3, atol=1e-4)
    assert losses(folder / "of_one") == pytest.approx(losses(folder / "one" / "ce"), rel=1e-5)
    assert [found["stopped"][0] for found in two] == [5, 5], "one rank was told to stop, both did"
    assert two[0]["stopped"][1].endswith("step-00000005")
    alone = rank_worker.run(folder / "of_two")
    assert alone["result"]["resumed_from"] == 5
    torch.testing.assert_close(alone["parameters"], one["ce"]["parameters"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("what", ["answers", "sharded answers"])
def test_measuring_is_shared(world, what):
    _, one, two = world
    for found in two:
        assert found[what]["texts"] == one["answers"]["texts"]
        for ours, theirs in zip(found[what]["scored"], one["answers"]["scored"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
        torch.testing.assert_close(found["sharded measured"], one["measured"], rtol=1e-3, atol=1e-4)


def test_what_cannot_be_shared_is_refused_and_a_failure_is_everybodys(world):
    for found in world[2]:
        assert "batch_size 3 cannot be shared by 2 ranks" in found["batch of 3 refused"]
        assert "45 sequences, which 2 ranks with sharded weights cannot share" in found["ce refused"]
        assert found["failed"] == ["list index out of range", "on rank 1 of 2"]


def test_a_rank_that_is_killed_leaves_nobody_waiting(world):
    first, second, seconds = world[1]["end"]
    assert second == -9 and first and seconds < 30
