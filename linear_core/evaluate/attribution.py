"""Who does the work in a hybrid: window or state (recipe section 6). Switches at inference, nothing is trained.

``hybrid``: as it is. ``exact``: the state is not read. ``linear``: the hybrid's own lagged read without the exact
output (it never sees the last w tokens: near-chance is expected). ``frozen``: the read is zero from a token on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.scores import Score, TaskSpec
from linear_core.evaluate.statistics import bootstrap

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def variants(frozen_from: int | None) -> dict[str, dict[str, Any]]:
    """Name → forward switches; ``frozen`` only when a token to freeze from is given."""
    found: dict[str, dict[str, Any]] = {"hybrid": {}, "exact": {"paths": "exact"}, "linear": {"paths": "linear"}}
    return found if frozen_from is None else found | {"frozen": {"state_frozen_from": frozen_from}}


def refusal(model: PreTrainedModel) -> str:
    """Why a model has nothing to attribute, or ''."""
    recipe = getattr(model, "recipe", None)
    if recipe is None:
        return "attribution needs a linearized model; the base has one path"
    if recipe.mechanism in ("none", "softmax"):
        return f"attribution needs a state; {recipe.name} has none"
    return ""


def attribute(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskSpec, *, frozen_from: int | None = None,
    batch_size: int | str = "auto",
) -> list[Score]:  # fmt: skip
    """A task scored once a path: metrics ``acc.hybrid``, ``acc.exact``, … and ``acc.state``, hybrid − exact, with the
    standard error of the paired difference (for perplexities: of the mean log-likelihood or loss an item).

    Raises ValueError for a model without a state, and as ``evaluate_task`` does.
    """
    from linear_core.evaluate.run import evaluate_task

    if reason := refusal(model):
        raise ValueError(reason)
    found: dict[str, list[Score]] = {}
    for name, switches in variants(frozen_from).items():
        found[name] = evaluate_task(model, tokenizer, task, batch_size=batch_size, switches=switches)
    scores = [
        dataclasses.replace(score, metric=f"{score.metric}.{name}") for name, group in found.items() for score in group
    ]
    return scores + list(_contributions(found["hybrid"], found["exact"]))


def _contributions(hybrid: list[Score], exact: list[Score]) -> Iterator[Score]:
    for with_state, without in zip(hybrid, exact):
        if with_state.value is None or without.value is None:
            continue
        a, b = without.details["values"], with_state.details["values"]
        low, high, p = bootstrap(a, b)
        difference = [y - x for x, y in zip(a, b)]
        mean = sum(difference) / len(difference)
        yield dataclasses.replace(
            with_state, metric=f"{with_state.metric}.state", value=mean, stderr=(high - low) / 3.92, flags=(),
            details={"items": with_state.details.get("items", []), "values": difference, "p": p},
        )  # fmt: skip
