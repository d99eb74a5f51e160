"""What to run: grids are pure functions that return frozen values. Imports no torch.

``ablation`` is the general grid, and every published table is a call of it; ``GRIDS`` names them all. Each takes base
models and, by keyword, any axis of ``ablation`` to put in place of its own. Combinations that mean nothing are left out
with the reason kept (``Sweep.left_out``).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import MERGES, Recipe, parse_budget
from linear_core.settings import TrainSettings
from sweeps import parameters
from sweeps.cell import Cell
from sweeps.sweep import Sweep, TaskSource, join, pin, task_source, with_tasks

__all__ = ["GRIDS", "Sweep", "TaskSource", "ablation", "join", "known_models", "pin", "task_source", "with_tasks"]

Words = str | Sequence[str]
PAPER_8B = ("llama3.1-8b", "qwen3-8b-base")
QWEN3 = ("qwen3-0.6b-base", "qwen3-1.7b-base", "qwen3-4b-base", "qwen3-8b-base", "qwen3-14b-base", "qwen3-32b")
REASONING = "piqa,arc_easy,arc_challenge,hellaswag,winogrande,mmlu"
SEVEN = f"{REASONING},lambada_openai"
S_NIAH = "niah_single_1@4096,niah_single_2@4096,niah_single_3@4096"
RULER_8 = ",".join(
    f"{task}@4096"
    for task in ("niah_multikey_1", "niah_multiquery", "niah_multivalue", "cwe", "fwe", "qa_hotpot", "qa_squad", "vt")
)
LATENCIES = ",".join(f"latency@{length}" for length in (2048, 4096, 8192, 16384, 32768))


def ablation(
    models: Words,
    mechanisms: Words = ("gla", "gdn"),
    budgets: Words = ("56+8",),
    adaptations: Words = ("none",),
    seeds: str | int | Sequence[int] = (1,),
    *,
    tasks: Words | Sequence[TaskSpec] = (),
    merges: Words = "",
    softmax_layers: Words = "none",
    train: TrainSettings | None = None,
    recipe: dict[str, Any] | None = None,
    source: str = "auto",
    name: str = "ablation",
) -> Sweep:
    """Mechanisms × budgets × adaptations × seeds on base models, each measured against its base model.

    Lists may come in any spelling of ``parameters.items``. ``merges``: "" is the mechanism's own. ``train``: the
    paper's unless given. ``recipe``: further fields of Recipe for all cells (gate_bias, …). Raises ValueError naming
    what is allowed for an unknown word; a combination that is impossible is left out instead.
    """
    train = train or TrainSettings()
    axes = {
        "mechanism": _checked(mechanisms, "mechanisms", lambda word: Recipe(mechanism=word, window=1, sinks=0)),
        "budget": _checked(budgets, "budgets", parse_budget),
        "adaptation": _checked(adaptations, "adaptations", lambda word: Recipe(adaptation=word)),
        "merge": _checked(merges, "merges", _known_merge) if merges else [""],
        "softmax_layers": _checked(softmax_layers, "softmax_layers", lambda word: Recipe(softmax_layers=word)),
    }
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    repeats = parameters.whole_numbers(seeds, "seeds")
    for base in known_models(models):
        cells.append(Cell.base_model(base))
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values))
            try:
                made = _recipe(chosen, recipe or {})
            except ValueError as error:
                left_out.append((_words(chosen), str(error)))
                continue
            if made.mechanism != "softmax":
                cells += [Cell(base=base, recipe=made, train=train, seed=seed) for seed in repeats]
    return Sweep(
        name=name, cells=tuple(dict.fromkeys(cells)), tasks=_specs(tasks), left_out=tuple(dict.fromkeys(left_out)),
        source=source,
    )  # fmt: skip


def _recipe(chosen: dict[str, str], extra: dict[str, Any]) -> Recipe:
    if chosen["mechanism"] == "softmax":
        return Recipe(mechanism="softmax", window=0, sinks=0)
    window, sinks = parse_budget(chosen["budget"])
    return Recipe(window=window, sinks=sinks, **{k: v for k, v in {**chosen, **extra}.items() if k != "budget"})


def _words(chosen: dict[str, str]) -> str:
    """A combination as recipes are written, e.g. ``none 0+0 conv``."""
    further = (chosen[axis] for axis in ("adaptation", "merge", "softmax_layers"))
    return " ".join([chosen["mechanism"], chosen["budget"], *(word for word in further if word not in ("", "none"))])


def _checked(value: Any, name: str, check: Callable[[str], Any]) -> list[str]:
    words = parameters.items(value, name)
    for word in words:
        check(word)
    return words


def _known_merge(word: str) -> None:
    if word not in MERGES:
        raise ValueError(f"merge {word!r} is not known; allowed: {', '.join(MERGES)}")


def _specs(tasks: Any) -> tuple[TaskSpec, ...]:
    if isinstance(tasks, (tuple, list)) and all(isinstance(task, TaskSpec) for task in tasks):
        return tuple(tasks)
    return parameters.tasks(tasks)


def known_models(models: Words) -> list[str]:
    """The names as cells carry them: of the registry where it knows the model, folders as absolute paths.

    Raises ValueError as ``linear_core.models.resolve`` does.
    """
    from linear_core.models import REGISTRY, resolve

    sources = {model.source: name for name, model in REGISTRY.items()}
    names = []
    for word in parameters.items(models, "models"):
        name = sources.get(word, word)
        if name not in REGISTRY:
            resolve(name)
            name = str(Path(name).resolve()) if os.path.isdir(name) else name
        names.append(name)
    return list(dict.fromkeys(names))


def _published(name: str, models: Words, axes: dict[str, Any], **defaults: Any) -> Sweep:
    """``ablation`` with a table's own axes, three seeds, and whatever the caller puts in their place."""
    return ablation(models, **{"name": name, "seeds": (1, 2, 3), "tasks": SEVEN, **defaults, **axes})


def table1(models: Words = PAPER_8B, **axes: Any) -> Sweep:
    """Pure linear attention: what each mechanism keeps without any exact attention (published tables 1 and 5)."""
    return _published("table1", models, axes, mechanisms="gla,kgla,gdn,hedgehog", budgets="0+0")


def table2(models: Words = PAPER_8B, **axes: Any) -> Sweep:
    """A fixed budget of 64 exact tokens: window alone against window and sinks (published tables 2 and 6)."""
    return _published("table2", models, axes, mechanisms="gla,kgla,gdn", budgets="64+0,56+8")


def table3(models: Words = PAPER_8B, **axes: Any) -> Sweep:
    """Adaptation of q, k and v: none, convolution, LoRA at budget 56+8 (published tables 3 and 7)."""
    return _published("table3", models, axes, mechanisms="gla,kgla,gdn", adaptations="none,conv,lora")


def table4(models: Words = "llama3.1-8b", **axes: Any) -> Sweep:
    """Against published peers: gdn with convolution at cache 64 and 128 (published table 4)."""
    own = {"mechanisms": "gdn", "budgets": "56+8,120+8", "adaptations": "conv", "tasks": REASONING}
    return _published("table4", models, axes, **own)


def table8(models: Words = "llama3.1-8b", **axes: Any) -> Sweep:
    """Needle retrieval by cache 128, 256, 512, 1024 (published table 8)."""
    own = {"mechanisms": "gdn", "budgets": "120+8,248+8,504+8,1016+8", "adaptations": "conv", "tasks": S_NIAH}
    return _published("table8", models, axes, **own)


def table9(models: Words = "llama3.1-8b", **axes: Any) -> Sweep:
    """RULER's eight columns at 4k by cache 128 and 896 (published table 9)."""
    own = {"mechanisms": "gdn", "budgets": "120+8,888+8", "adaptations": "conv", "tasks": RULER_8}
    return _published("table9", models, axes, **own)


def scaling(models: Words = (*QWEN3, "llama3.1-8b"), **axes: Any) -> Sweep:
    """One recipe over base models of growing size, Qwen3 0.6B to 32B and LLaMA 8B (published table 10)."""
    return _published("scaling", models, axes, mechanisms="gdn", adaptations="conv")


def table10(models: Words = QWEN3, **axes: Any) -> Sweep:
    """Qwen3 0.6B to 32B with gdn 56+8 and convolution (published table 10)."""
    return scaling(models, **{"name": "table10", **axes})


def figure5(models: Words = PAPER_8B, **axes: Any) -> Sweep:
    """Softmax attention kept in 10 to 50 % of the layers, evenly spaced or the hardest (published figure 5)."""
    kept = [f"{kind}:{share}" for share in (0.1, 0.2, 0.3, 0.4, 0.5) for kind in ("uniform", "hardest")]
    own = {"mechanisms": "gdn", "adaptations": "conv", "softmax_layers": ["none", *kept]}
    return _published("figure5", models, axes, **own, tasks="mmlu,lambada_openai")


def latency(models: Words = "llama3.1-8b", **axes: Any) -> Sweep:
    """Prefill and decoding speed and cache by length, 2K to 32K, against full attention (published figure 2a)."""
    train = axes.pop("train", None) or TrainSettings(tokens=4096, warmup_steps=0)  # one step: speed needs no training
    own = {"mechanisms": "gla,gdn,hedgehog", "seeds": (1,), "train": train, "tasks": LATENCIES}
    return _published("latency", models, axes, **own)


def diagnostics(models: Words = PAPER_8B, **axes: Any) -> Sweep:
    """Attention error by layer and token, key concentration, residual: gla and gdn, pure and at 56+8 (figures 2b, 2c, 3)."""
    own = {"mechanisms": "gla,gdn", "budgets": "0+0,56+8", "seeds": (1,), "tasks": "diagnostics@2048:65536,perplexity"}
    return _published("diagnostics", models, axes, **own)


def past_paper(models: Words = "smollm2-135m", **axes: Any) -> Sweep:
    """Past the paper, one change at a time from gdn 56+8: merge, gate bias, read scale, convolution, objective."""
    train = axes.pop("train", None) or TrainSettings()
    changes: list[dict[str, Any]] = [
        {}, {"merges": "mass"}, {"merges": "mass", "adaptations": "conv"}, {"adaptations": "conv"},
        {"recipe": {"gate_bias": 3.0}}, {"recipe": {"learned_read_scale": True}},
        {"merges": "mass", "recipe": {"gate_bias": 3.0}},
        {"train": dataclasses.replace(train, objective="kl")},
        {"train": dataclasses.replace(train, objective="layerwise")},
    ]  # fmt: skip
    own = {"mechanisms": "gdn", "train": train}
    parts = [_published("past-paper", models, axes, **{**own, **change}) for change in changes]
    return join(axes.get("name", "past-paper"), *parts)


GRIDS: dict[str, Callable[..., Sweep]] = {
    "ablation": ablation, "table1": table1, "table2": table2, "table3": table3, "table4": table4, "table8": table8,
    "table9": table9, "table10": table10, "scaling": scaling, "figure5": figure5, "latency": latency,
    "diagnostics": diagnostics, "past-paper": past_paper,
}  # fmt: skip
