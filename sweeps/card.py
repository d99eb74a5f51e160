"""What a model card says of a cell that the store knows: its training and all its scores beside the base model's."""

from __future__ import annotations

from typing import Any

from linear_core.evaluate.scores import Score
from sweeps import queries
from sweeps.cell import Cell
from sweeps.opening import Opened
from sweeps.store import Store
from sweeps.tables import HIGHER, PER_CENT
from sweeps.views import signed

TEXTS = {"self": "samples that the base model wrote", "local": "files of text", "hub": "a data set of the hub"}
SPEED = "latency"  # the task whose scores are speeds and bytes


def card_of(opened: Opened, *, delta: bool = False) -> tuple[str, dict[str, Any]]:
    """Model card and training facts of an opened cell; ("", {}) for what is no cell."""
    from linear_core.card import model_card

    cell = opened.cell
    if cell is None or opened.base is None or opened.recipe is None:
        return "", {}
    store = Store()
    base_key = cell.base_of().train_key
    found = queries.scores_of(store, [base_key, cell.train_key])
    own = [score for key, _, score in found if key == cell.train_key]
    before = [score for key, _, score in found if key == base_key]
    speeds = [score for score in own if score.task.name == SPEED]
    card = model_card(
        opened.base, opened.recipe, training=training_rows(cell, queries.provenance_of(store).get(cell.train_key, {})),
        scores=score_table([score for score in own if score not in speeds], before), speed=score_table(speeds, before),
        delta=delta,
    )  # fmt: skip
    return card, {"train_key": cell.train_key}


def training_rows(cell: Cell, found: dict[str, Any]) -> dict[str, str]:
    """Rows of the card's table: settings, text, and from the provenance (when there is one) what it took."""
    train = cell.train
    if train is None:
        return {}
    result = found.get("training", {})
    rows = {
        "tokens": f"{train.tokens:,} ({train.sequence_length:,} a sequence, {train.batch_size} a step)",
        "objective": train.objective,
        "optimiser": f"AdamW, peak learning rate {train.peak_learning_rate(cell.recipe.adaptation):g}, "
        f"{train.warmup_steps} steps of warm-up, cosine to {train.final_learning_rate:g}",
        "text": f"{TEXTS.get(cell.data.partition('-')[0], 'text')} (`{cell.data}`)",
        "seed": str(cell.seed),
    }
    if result.get("loss") is not None:
        rows["loss of the last step"] = f"{result['loss']:.3f}"
    if found.get("train_seconds"):
        rate = f", {result['tokens_per_second']:,.0f} tokens/s" if result.get("tokens_per_second") else ""
        rows["took"] = f"{found['train_seconds'] / 60:.1f} minutes on {found.get('hardware', 'unknown hardware')}{rate}"
    if commit := found.get("commit"):
        versions = found.get("versions", {})
        named = ", ".join(f"{name} {versions[name]}" for name in ("golinear", "torch", "transformers") if name in versions)
        rows["made by"] = f"{named}; commit `{commit[:12]}`{' with changes' if found.get('dirty') else ''}, {found.get('at', '')}"
    return rows | {"base model's revision": f"`{cell.revision}`", "key": f"`{cell.train_key}`"}


def score_table(own: list[Score], before: list[Score]) -> str:
    """Markdown: value and standard error of this model and of its base on the same items, and the gap. "" for none."""
    if not own:
        return ""
    base = {(s.task, s.metric, s.source, s.harness): s for s in before}
    rows = ["| task | metric | base model | this model | gap | items |", "|---|---|--:|--:|--:|--:|"]
    notes: dict[str, None] = {}
    for score in own:
        reference = base.get((score.task, score.metric, score.source, score.harness))
        scale = 100.0 if score.metric in PER_CENT else 1.0
        gap = ""
        if reference and reference.value is not None and score.value is not None:
            gap = signed((score.value - reference.value) * scale)
        rows.append(
            f"| {score.task.label} | {_metric(score.metric)} | {_value(reference, scale)} | {_value(score, scale)} | {gap} "
            f"| {score.samples or ''} |"
        )
        for note in filter(None, (score.reason, *score.flags)):
            notes[f"{score.task.label}: {note}"] = None
        if score.source:
            notes[f"{score.task.label}: {score.source}, {score.harness}"] = None
    return "\n".join([*rows, "", *(f"- {note}" for note in notes)])


def _metric(name: str) -> str:
    return f"{name}{', %' if name in PER_CENT else ''} {'↑' if name in HIGHER else '↓'}"


def _value(score: Score | None, scale: float) -> str:
    if score is None or score.value is None:
        return "–"
    error = "" if score.stderr is None else f" ± {score.stderr * scale:.2g}"
    return f"{score.value * scale:.4g}{error}"
