"""The model card of an export: what it is, how to use it, how it was made, what it scores, what it cannot do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from linear_core.models import REGISTRY, BaseModel
from linear_core.recipe import Recipe

MIB = 2**20
LENGTHS = (1024, 4096, 8192, 32768, 131072)  # as far as the base model's positions go
MERGES = {
    "sum": "the two reads are added", "shared": "one normaliser over both",
    "mass": "weighed by the share of softmax mass outside the window",
}  # fmt: skip
ADAPTATIONS = {
    "none": "none", "conv": "a causal convolution on q, k and v of the linear path",
    "lora": "LoRA on q, k, v and output projections, merged into the weights of a full export",
}  # fmt: skip


def model_card(
    base: BaseModel,
    recipe: Recipe,
    *,
    training: Mapping[str, Any] | None = None,
    scores: str = "",
    speed: str = "",
    delta: bool = False,
) -> str:
    """Markdown with the metadata that the Hugging Face hub reads; the licence is the base model's.

    training: rows of the table "Training" (none: it is not trained). scores, speed: Markdown tables of what was measured.
    delta: the folder holds the new parameters only.
    """
    from linear_core.inspect import inspect_recipe

    facts = inspect_recipe(base.shape, recipe)
    share = 100 * facts["new_parameters"] / facts["base_parameters"]
    intro = (
        f"[{_source(base)}](https://huggingface.co/{_source(base)})" if "/" in _source(base) else f"`{_source(base)}`"
    ) + (
        f" with softmax attention replaced in {facts['linearized_layers']} of {facts['layers']} layers: each token attends "
        f"exactly to {_window(recipe)}, and to all others through {_state(recipe)}. Memory and time of a decode step do not "
        f"grow with the text. All weights of the base model are frozen; {facts['new_parameters']:,} new parameters "
        f"({share:.2g} %) were added."
    )
    parts = [
        _metadata(base), f"# {base.name}, linearized: {recipe.name}", intro, "## Use", _usage(base, delta),
        "## Recipe", _table(("", ""), _recipe_rows(recipe).items()),
        "## Cache and speed", _cache(facts, base.shape.max_positions), speed or "Speed was not measured with this export: "
        "`golinear bench decode` measures it against full attention on your machine.",
        "## Training", _table(("", ""), training.items()) if training else "None: the new parameters have their start values.",
        "## Scores", scores or "Not measured. `golinear evaluate` scores this folder.",
        "## Limits", _limits(recipe, bool(training)),
        "## Licence", _licence(base),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _source(base: BaseModel) -> str:
    """The hub id where there is one: a local copy of a registered model is still that model."""
    known = REGISTRY.get(base.name)
    if known is not None:
        return known.source
    return base.name if base.is_folder else base.source


def _metadata(base: BaseModel) -> str:
    lines = ["---", f"license: {base.licence}", f"base_model: {_source(base)}", "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", "tags: [linear-attention, golinear]", "---"]
    return "\n".join(lines)


def _window(recipe: Recipe) -> str:
    if not recipe.window:
        return "no other token"
    sinks = f" and the first {recipe.sinks}" if recipe.sinks else ""
    return f"the last {recipe.window} tokens{sinks}"


def _state(recipe: Recipe) -> str:
    return "nothing (no state)" if recipe.mechanism == "none" else f"a `{recipe.mechanism}` state of constant size"


def _usage(base: BaseModel, delta: bool) -> str:
    if delta:
        return (
            f"This folder holds the new parameters only and needs golinear and the base model (`{base.name}`):\n\n"
            "```python\nfrom linear_core.export import load_linearized\n\n"
            'model, tokenizer = load_linearized("PATH_OF_THIS_FOLDER")\n```'
        )
    return (
        "With transformers alone; the code that it runs lies in this folder:\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "PATH_OF_THIS_FOLDER"\n'
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        'prompt = tokenizer("The sea", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))\n```"
    )


def _recipe_rows(recipe: Recipe) -> dict[str, Any]:
    rows = {"mechanism": f"`{recipe.mechanism}`", "exact attention": f"window {recipe.window}, sinks {recipe.sinks}"}
    if recipe.mechanism != "none" and recipe.window:
        rows["merge"] = f"`{recipe.merge}`: {MERGES[recipe.merge]}"
    rows["adaptation"] = ADAPTATIONS[recipe.adaptation]
    if recipe.softmax_layers != "none":
        rows["layers that keep softmax attention"] = recipe.softmax_layers
    changed = [f.name for f in dataclasses.fields(recipe) if f.name not in ("mechanism", "window", "sinks", "adaptation", "merge",
               "softmax_layers") and getattr(recipe, f.name) != f.default]  # fmt: skip
    return rows | {name.replace("_", " "): getattr(recipe, name) for name in changed}


def _cache(facts: Mapping[str, Any], positions: int) -> str:
    rows = [
        (f"{row['length']:,}", f"{row['cache_bytes'] / MIB:,.1f} MiB", f"{row['full_attention_bytes'] / MIB:,.1f} MiB")
        for row in facts["by_length"]
        if row["length"] in LENGTHS and row["length"] <= positions
    ]
    table = _table(("tokens so far", "cache of one sequence", "full attention"), rows)
    return f"{table}\n\nFull attention's cache is smaller up to {facts['break_even_tokens']:,} tokens."


def _limits(recipe: Recipe, trained: bool) -> str:
    limits = []
    if not trained:
        limits.append("It is not trained: what it writes beyond its window is noise.")
    if recipe.window:
        limits.append(
            f"Up to {recipe.window + recipe.sinks} tokens it equals the base model; what is further away is only in the state."
            if recipe.adaptation != "lora"
            else "LoRA changes short texts as well."
        )
    limits += [
        "A state of fixed size cannot recall many distant items: look at the needle and RULER scores before long documents are "
        "trusted to it, and expect worse where none is given.",
        "Scores on short prompts say little about that: they fit into the window.",
        "The cache cannot be cropped, so assisted decoding is refused.",
        "Biases, dangers and knowledge of the base model are inherited; nothing was done about them.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)


def _licence(base: BaseModel) -> str:
    text = f"That of the base model ({base.licence}), with its conditions; the modelling code is Apache-2.0."
    return text + (" Built with Llama." if base.licence.startswith("llama") else "")


def _table(header: tuple[str, ...], rows: Any) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(['---'] + ['--:'] * (len(header) - 1) if header[0] else ['---', '---'])}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
