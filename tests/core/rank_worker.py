"""What tests.core.test_ranks runs in one process and in two ranks: ``python -m tests.core.rank_worker RANK SIZE PORT FOLDER``."""

import dataclasses
import os
import sys
from pathlib import Path

import torch

from linear_core import ranks
from linear_core.convert import convert, new_parameters
from linear_core.evaluate import windows
from linear_core.evaluate.harness import PrefixLM
from linear_core.outcome import Interrupted
from linear_core.recipe import Recipe
from linear_core.train import train
from tests.core import running, tiny
from tests.core.running import SETTINGS
from tests.core.texts import byte_tokenizer

RECIPE = "gdn 6+2 conv"
UNEVEN = dataclasses.replace(SETTINGS, tokens=11 * 128 + 32)  # one sequence in the last step: rank 1 has none
EVEN = dataclasses.replace(SETTINGS, objective=",".join(f"{name}:{4 * 128}" for name in ("layerwise", "kl", "ce")))
CHAIN = dataclasses.replace(UNEVEN, objective=f"layerwise:{5 * 128},kl:{6 * 128 + 32}")


def run(folder, settings=UNEVEN, sharded=False, **options):
    """Train; returns what came of it, as numbers."""
    base = tiny.base()
    if sharded:
        ranks.shard(base, "cpu")
    model = convert(base, Recipe.parse(RECIPE), seed=3)
    texts = running.tokens(folder.parent / f"texts of {os.getpid()}")  # each process writes its own files
    result = train(model, settings, texts, folder=folder, seed=1, **options)
    parameters = {name: p.detach().clone() for name, p in new_parameters(model).items()}
    with torch.no_grad():
        logits = model(input_ids=tiny.tokens(20)).logits
    return {"result": dataclasses.asdict(result), "parameters": parameters, "logits": logits}


def answers(model):
    """Log-likelihoods and texts of a few documents, some of them asked about twice."""
    from lm_eval.api.instance import Instance

    def asked(kind, arguments):
        return [Instance(kind, {}, a, i, ("a task", i // 2, 1)) for i, a in enumerate(arguments)]

    lm = PrefixLM(model, byte_tokenizer(), ranks=ranks.sharing(model))
    scored = lm.loglikelihood(asked("loglikelihood", [(f"the {'old ' * n}man and", c) for n in range(5) for c in (" sea", " s")]))
    texts = lm.generate_until(asked("generate_until", [("abc" * n, {"max_gen_toks": 8}) for n in (1, 9, 4)]))
    return {"scored": [list(pair) for pair in scored], "texts": texts, "asked": lm.tokens_asked}


def measured(model, folder):
    """Losses of held-out windows, and agreement with the base model."""
    held_out = windows.Windows(tiny.tokens(24, batch=3, seed=9), ("a", "b", "c"))
    folder.mkdir(exist_ok=True)
    same, kl = windows.agreement(model, windows.base_reference(model, held_out, folder), held_out)
    return [windows.token_losses(model, held_out), same, kl]


def straight(folder):
    """What must come out alike, whatever the number of ranks."""
    found = {name: run(folder / name, settings) for name, settings in (("ce", UNEVEN), ("chain", CHAIN))}
    model = tiny.linearized(RECIPE)
    return found | {"answers": answers(model), "measured": measured(model, folder / "references")}


def of_two(folder, me):
    """What only ranks can do."""
    found = {"sharded": run(folder / "sharded", EVEN, sharded=True)}
    base = tiny.base()
    ranks.shard(base, "cpu")
    model = tiny.randomised(convert(base, Recipe.parse(RECIPE)))
    found |= {"sharded answers": answers(model), "sharded measured": measured(model, folder / "sharded_references")}
    found["resumed"] = run(folder / "of_one")
    asked = []
    try:
        run(folder / "of_two", should_stop=lambda: me.rank == 1 and (asked.append(1) or len(asked) == 6))
    except Interrupted as error:
        found["stopped"] = [error.step, str(error.saved)]
    for name, settings, sharded in (
        ("batch", dataclasses.replace(SETTINGS, batch_size=3), False), ("uneven", UNEVEN, True),
    ):  # fmt: skip
        try:
            run(folder / name, settings, sharded)
        except ValueError as error:
            found[name] = str(error)
    try:
        me.gather(lambda: [][me.rank - 1] if me.rank else 0)
    except IndexError as error:
        found["failed"] = [str(error), *error.__notes__]
    return found


def main(rank, size, port, folder):
    torch.set_num_threads(1)
    with ranks.joined(rank, size, f"127.0.0.1:{port}", "cpu") as me:
        found = straight(folder / "ranks") | of_two(folder, me)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]))
