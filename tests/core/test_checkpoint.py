import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from linear_core import checkpoint
from linear_core.convert import new_parameters
from linear_core.train import Interrupted, train
from tests.core import running
from tests.core.running import SETTINGS
from tests.core.test_train import curve

RUN = """
import sys
from pathlib import Path
import torch
from linear_core.train import train
from tests.core import running
torch.set_num_threads(1)
folder = Path(sys.argv[1])
def pace(row):
    if row["step"] == 7:
        print("step 7", flush=True)
        import time; time.sleep(60)
train(running.model("gdn 6+2 conv"), running.SETTINGS, running.tokens(folder / "data"), folder=folder, seed=1,
      checkpoint_minutes=0, on_progress=pace)
"""


def parameters(model):
    return {n: p.detach().clone() for n, p in new_parameters(model).items()}


def stop_after(steps):
    asked = []
    return lambda: asked.append(1) or len(asked) > steps


def test_resuming_after_sigkill_equals_the_straight_run_bit_for_bit(tmp_path):
    straight = running.model("gdn 6+2 conv")
    train(straight, SETTINGS, running.tokens(tmp_path / "a" / "data"), folder=tmp_path / "a", seed=1)
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "b")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "step 7\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list((tmp_path / "b" / "checkpoints").glob("step-*"))) == checkpoint.KEPT
    with (tmp_path / "b" / "curve.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # what a kill may leave
    resumed = running.model("gdn 6+2 conv")
    result = train(resumed, SETTINGS, running.tokens(tmp_path / "b" / "data"), folder=tmp_path / "b", seed=1)
    assert result.resumed_from == 7 and result.tokens_seen == SETTINGS.tokens
    assert curve(tmp_path / "b") == curve(tmp_path / "a")
    ours, theirs = parameters(straight), parameters(resumed)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("damage", ["no state", "cut tensors", "flipped bit", "left partial"])
def test_an_incomplete_or_damaged_checkpoint_is_passed_over(damage, tmp_path):
    data = running.tokens(tmp_path)
    for until in (4, 6):
        with pytest.raises(Interrupted):
            train(
                running.model(),
                SETTINGS,
                data,
                folder=tmp_path,
                seed=1,
                should_stop=stop_after(until - (4 if until == 6 else 0)),
            )
    newest = tmp_path / "checkpoints" / "step-00000006"
    if damage == "no state":
        (newest / checkpoint.STATE).unlink()
    elif damage == "left partial":
        newest.rename(newest.with_name(".partial-00000006"))
    else:
        content = bytearray((newest / checkpoint.TENSORS).read_bytes())
        content[-5] ^= 1
        (newest / checkpoint.TENSORS).write_bytes(content[:-100] if damage == "cut tensors" else content)
    result = train(running.model(), SETTINGS, data, folder=tmp_path, seed=1)
    assert result.resumed_from == 4 and result.steps == 12
    assert [row["step"] for row in curve(tmp_path)] == list(range(12))
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"settings": dataclasses.replace(SETTINGS, learning_rate=0.02)},
            r"settings.learning_rate is 0.01 .* 0.02 now",
        ),
        ({"settings": dataclasses.replace(SETTINGS, clip_norm=0.5)}, r"settings.clip_norm is 'default' .* 0.5 now"),
        ({"seed": 2}, "seed is 1 in the checkpoint, 2 now"),
        ({"text": 1}, "data is"),
        ({"recipe": "gla 6+2"}, "recipe.mechanism is 'gdn' in the checkpoint, 'gla' now"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, message, tmp_path):
    with pytest.raises(Interrupted):
        train(running.model(), SETTINGS, running.tokens(tmp_path), folder=tmp_path, seed=1, should_stop=stop_after(3))
    with pytest.raises(ValueError, match=message):
        train(
            running.model(change.get("recipe", "gdn 6+2")), change.get("settings", SETTINGS),
            running.tokens(tmp_path, change.get("text", 0)), folder=tmp_path, seed=change.get("seed", 1),
        )  # fmt: skip


def test_a_checkpoint_holds_no_pickle_and_the_last_two_are_kept(tmp_path):
    train(running.model(), SETTINGS, running.tokens(tmp_path), folder=tmp_path, seed=1, checkpoint_minutes=0)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000011", "step-00000012"]
    files = {p.name for p in (tmp_path / "checkpoints" / kept[1]).iterdir()}
    assert files == {"state.safetensors", "state.json"}
    state = json.loads((tmp_path / "checkpoints" / kept[1] / "state.json").read_text())
    assert state["step"] == 12 and state["tokens_seen"] == SETTINGS.tokens and state["identity"]["seed"] == 1


def test_a_finished_run_is_not_trained_again(tmp_path):
    data = running.tokens(tmp_path)
    first = train(running.model(), SETTINGS, data, folder=tmp_path, seed=1)
    started = time.monotonic()
    model = running.model()
    again = train(
        model, SETTINGS, data, folder=tmp_path, seed=1, on_progress=lambda row: pytest.fail("a step was made")
    )
    assert again.steps == 12 and again.loss == first.loss and time.monotonic() - started < 5
    assert (tmp_path / "new_parameters.safetensors").exists()
