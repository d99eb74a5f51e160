"""What the tests of ranks run in one process and in two: ``python -m tests.core.rank_worker RANK SIZE PORT FOLDER DEVICE END``.

On a GPU the same in bfloat16, of a size that its kernels take.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from linear_core import ranks
from linear_core.convert import convert, new_parameters
from linear_core.evaluate import windows
from linear_core.outcome import Interrupted
from linear_core.recipe import Recipe
from linear_core.train import train
from tests.core import running, tiny
from tests.core.running import SETTINGS
from tests.core.texts import byte_tokenizer

RECIPE = {"cpu": "gdn 6+2 conv", "cuda": "gdn 56+8 conv"}
LENGTH = {"cpu": 32, "cuda": 128}
SHAPE = {"cpu": {}, "cuda": {"hidden": 256, "head_dim": 64, "intermediate": 512}}
STOPPED = "stopped"  # a file that says that the run of one process has come to its checkpoint
ENDS = {"killed": lambda: os.kill(os.getpid(), signal.SIGKILL), "fails": lambda: sys.exit("rank 1 fails, as it is to")}


def settings(device):
    """The runs by name; the last step of ``ce`` and ``chain`` has one sequence: rank 1 has none."""
    length = LENGTH[device]
    even = dataclasses.replace(
        SETTINGS, tokens=48 * length, sequence_length=length,
        objective=",".join(f"{name}:{16 * length}" for name in ("layerwise", "kl", "ce")),
    )  # fmt: skip
    ce = dataclasses.replace(even, tokens=45 * length, objective="ce")
    chain = dataclasses.replace(ce, objective=f"layerwise:{20 * length},kl:{25 * length}")
    return {"ce": ce, "chain": chain, "even": even, "batch of 3": dataclasses.replace(ce, batch_size=3)}


def base(device, sharded=False):
    model = tiny.base(**SHAPE[device])
    if device == "cuda":
        model = model.to(torch.bfloat16)
    if sharded:
        ranks.shard(model, device)
    return model if sharded else model.to(device)


def randomised(device, sharded=False):
    return tiny.randomised(convert(base(device, sharded), Recipe.parse(RECIPE[device])))


def run(folder, name="ce", device="cpu", sharded=False, **options):
    """Train; returns what came of it, as numbers."""
    started = time.monotonic()
    model = convert(base(device, sharded), Recipe.parse(RECIPE[device]), seed=3)
    texts = running.tokens(folder.parent / f"texts of {os.getpid()}")  # each process writes its own files
    result = train(model, settings(device)[name], texts, folder=folder, seed=1, **options)
    parameters = {name: p.detach().cpu() for name, p in new_parameters(model).items()}
    with torch.no_grad():
        logits = model(input_ids=tiny.tokens(20).to(device)).logits.float().cpu()
    seconds, numbers = time.monotonic() - started, " ".join(f"{loss:.4f}" for loss in losses(folder))
    sys.stderr.write(f"{folder.name}/{name}, {ranks.current()}: {seconds:.1f} s, losses {numbers}\n")
    return {"result": dataclasses.asdict(result), "parameters": parameters, "logits": logits}


def stopped_after_six(folder, device="cpu"):
    """A run of one process that was interrupted: it can go on from step 6."""
    asked = []
    try:
        run(folder, device=device, should_stop=lambda: asked.append(1) or len(asked) == 7)
    except Interrupted:
        (folder / STOPPED).touch()


def losses(folder):
    """Of each step."""
    return [json.loads(line)["loss"] for line in (folder / "curve.jsonl").read_text().splitlines()]


def answers(model):
    """Log-likelihoods and texts of a few documents, some of them asked about twice."""
    from lm_eval.api.instance import Instance

    from linear_core.evaluate.harness import PrefixLM

    def asked(kind, arguments):
        return [Instance(kind, {}, a, i, ("a task", i // 2, 1)) for i, a in enumerate(arguments)]

    lm = PrefixLM(model, byte_tokenizer(), ranks=ranks.sharing(model))
    scored = lm.loglikelihood(asked("loglikelihood", [(f"the {'old ' * n}man and", c) for n in range(5) for c in (" sea", " s")]))
    texts = lm.generate_until(asked("generate_until", [("abc" * n, {"max_gen_toks": 8}) for n in (1, 9, 4)]))
    return {"scored": [list(pair) for pair in scored], "texts": texts, "asked": lm.tokens_asked}


def measured(model, folder):
    """Losses of held-out windows, and agreement with the base model."""
    held_out = windows.Windows(tiny.tokens(3 * LENGTH[model.device.type] // 4, batch=3, seed=9), ("a", "b", "c"))
    folder.mkdir(exist_ok=True)
    same, kl = windows.agreement(model, windows.base_reference(model, held_out, folder), held_out)
    return [windows.token_losses(model, held_out), same, kl]


def straight(folder, device):
    """What must come out alike, whatever the number of ranks."""
    found = {name: run(folder / name, name, device) for name in ("ce", "chain")[: 1 if device == "cuda" else 2]}
    model = randomised(device)
    found["measured"] = measured(model, folder / "references")
    return found | ({"answers": answers(model)} if device == "cpu" else {})


def of_two(folder, device, me):
    """What only ranks can do."""
    while not (folder / "of_one" / STOPPED).exists():
        time.sleep(0.1)
    found = {"resumed": run(folder / "of_one", device=device)}
    asked = []
    try:
        run(folder / "of_two", device=device, should_stop=lambda: me.rank == 1 and (asked.append(1) or len(asked) == 6))
    except Interrupted as error:
        found["stopped"] = [error.step, str(error.saved)]
    found["sharded"] = run(folder / "sharded", "even", device, sharded=True)
    model = randomised(device, sharded=True)
    found["sharded measured"] = measured(model, folder / "sharded_references")
    if device == "cpu":
        found["sharded answers"] = answers(model)
    for name, sharded in (("batch of 3", False), ("ce", True)):
        try:
            run(folder / "refused", name, device, sharded)
        except ValueError as error:
            found[f"{name} refused"] = str(error)
    try:
        me.gather(lambda: [][me.rank - 1] if me.rank else 0)
    except IndexError as error:
        found["failed"] = [str(error), *error.__notes__]
    return found


def main(rank, size, port, folder, device, end):
    """end: how rank 1 leaves a run of its group at last; ``… alone``: there is nothing before it."""
    torch.set_num_threads(1)
    end, *alone = end.split()
    asked = []
    with ranks.joined(rank, size, f"127.0.0.1:{port}", f"cuda:{rank}" if device == "cuda" else device) as me:
        if not alone:
            found = straight(folder / "ranks", device) | of_two(folder, device, me)
            torch.save(found, folder / f"rank{rank}.pt")
        leaves = lambda: rank == 1 and (asked.append(1) or len(asked) == 6) and ENDS[end]()  # noqa: E731
        run(folder / "left", device=device, should_stop=leaves)


@contextmanager
def two(folder, device, end):
    """Two ranks at work meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.core.rank_worker"]
    started = [subprocess.Popen([*command, str(rank), "2", str(port), str(folder), device, end]) for rank in range(2)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def ended(started, seconds):
    """Waits for two ranks of which the second leaves. Returns both exit statuses, None for one that was still there after
    ``seconds`` or a minute after the other, and the seconds between the two."""
    statuses, at = [], time.monotonic()
    for process, patience in ((started[1], seconds), (started[0], 60)):
        try:
            statuses.append(process.wait(patience))
        except subprocess.TimeoutExpired:
            statuses.append(None)
        before, at = at, time.monotonic()
    return statuses[1], statuses[0], at - before


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), *sys.argv[5:])
