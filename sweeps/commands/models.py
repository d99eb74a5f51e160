"""golinear inspect, train, evaluate, convert, export, generate, bench: one model, outside any sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import typer

from sweeps.commands.console import Refused, console, say

WHAT = typer.Argument(help="registry name, hub id, folder, or a cell's key")
DEVICE = typer.Option("", help="cpu, cuda, …; default: cuda where there is one")
JSON = typer.Option(False, "--json", help="as JSON")
OUT = typer.Option(..., "-o", "--out", help="folder to write")
MECHANISM = typer.Option("gdn", help="none, hedgehog, gla, kgla, gdn, gdn_scalar")
BUDGET = typer.Option("56+8", help="window+sinks")
ADAPTATION = typer.Option("none", help="none, conv, lora")
MERGE = typer.Option("", help="sum, shared, mass; default: the mechanism's own")
LAYERS = typer.Option("none", help="that keep softmax attention: none, uniform:0.2, list:0,5,9, hardest:0.2")


def _plan(arguments: list[str]) -> int:
    from sweeps.plan_bench import main

    return main(arguments)


MORE_BENCHES: dict[str, Callable[[list[str]], int]] = {"plan": _plan}  # beside those of linear_core; flows adds its own


def add_to(app: typer.Typer) -> None:
    for command in (inspect, train, evaluate, convert, export, generate):
        app.command()(command)
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=passed_on)(bench)


def inspect(
    what: str = WHAT,
    mechanism: str = MECHANISM,
    budget: str = BUDGET,
    adaptation: str = ADAPTATION,
    merge: str = MERGE,
    layers: str = LAYERS,
    json: bool = JSON,
) -> None:
    """Layers, new parameters and cache bytes by length against full attention; needs no weights.

    Of a linearized folder or a cell: what it is, whatever the options say.
    """
    from rich.table import Table

    from linear_core.inspect import inspect_recipe
    from sweeps.opening import described

    shape, own = described(what)
    facts = inspect_recipe(shape, own or _recipe(mechanism, budget, adaptation, merge, layers))
    if json:
        console.print_json(data={"model": what, **facts})
        return
    mib = 2**20
    console.print(
        f"{what} with {facts['name']}: {facts['linearized_layers']} of {facts['layers']} layers linearized, "
        f"{facts['new_parameters'] / 1e6:.2f}M new parameters beside {facts['base_parameters'] / 1e6:,.0f}M\n"
        f"cache of one sequence {facts['cache_bytes'] / mib:.1f} MiB at any length, as large as full attention's at "
        f"{facts['break_even_tokens']:,} tokens",
        highlight=False,
    )
    rows = Table("tokens", "cache, MiB", "full attention, MiB", box=None)
    for row in facts["by_length"]:
        sizes = (row["cache_bytes"], row["full_attention_bytes"])
        rows.add_row(f"{row['length']:,}", *(f"{size / mib:,.1f}" for size in sizes))
    console.print(rows)


def _recipe(mechanism: str, budget: str, adaptation: str, merge: str, layers: str):  # type: ignore[no-untyped-def]
    from linear_core.recipe import Recipe, parse_budget

    window, sinks = parse_budget(budget)
    return Recipe(mechanism=mechanism, window=window, sinks=sinks, adaptation=adaptation, merge=merge, softmax_layers=layers)


def convert(
    what: str = WHAT,
    out: Path = OUT,
    mechanism: str = MECHANISM,
    budget: str = BUDGET,
    adaptation: str = ADAPTATION,
    merge: str = MERGE,
    layers: str = LAYERS,
    data: str = typer.Option("auto", help="text that shows which layers are the hardest: auto, local:PATH, hub:NAME, self"),
    seed: int = typer.Option(0, help="of the new parameters' start values"),
    delta_only: bool = typer.Option(False, "--delta-only", help="only the new parameters and a pointer to the base"),
) -> None:
    """Linearize a base model, untrained, and write it as a folder."""
    from linear_core import export as exporting
    from linear_core import models
    from linear_core.convert import convert as linearize
    from linear_core.data import open_tokens
    from linear_core.diagnostics import resolve_hardest

    base, recipe = models.resolve(what), _recipe(mechanism, budget, adaptation, merge, layers)
    loaded, tokenizer = models.load(base), models.load_tokenizer(base)
    chosen = resolve_hardest(recipe, loaded, lambda: open_tokens(data, tokenizer, base=base))
    model = linearize(loaded, chosen, seed=seed)
    if delta_only:
        made = exporting.export_delta(model, base, models.revision(base), out)
    else:
        made = exporting.export(model, tokenizer, base, out)
    console.print(f"wrote {made}", highlight=False)


def export(
    what: str = typer.Argument(help="a cell's key, its end, or its folder"),
    out: Path = OUT,
    delta_only: bool = typer.Option(False, "--delta-only", help="only the new parameters and a pointer to the base"),
) -> None:
    """Write a trained cell as a folder that AutoModelForCausalLM loads, with its model card."""
    from linear_core import export as exporting
    from sweeps.card import card_of
    from sweeps.opening import open_model

    opened = open_model(what, backbone="full")
    if opened.base is None or opened.recipe is None:
        raise ValueError(
            f"{what} is no trained cell; golinear status lists cells, golinear convert linearizes a base model"
        )
    card, facts = card_of(opened, delta=delta_only)
    if delta_only:
        from linear_core.models import revision

        made = exporting.export_delta(opened.model, opened.base, revision(opened.base), out, card=card)
    else:
        made = exporting.export(opened.model, opened.tokenizer, opened.base, out, card=card, trained_with=facts)
    console.print(f"wrote {made}", highlight=False)


def generate(
    what: str = WHAT,
    prompt: str = typer.Argument(help="what to go on from"),
    tokens: int = typer.Option(64, help="tokens to write at most"),
    temperature: float = typer.Option(0.0, help="0: greedy"),
    device: str = DEVICE,
) -> None:
    """Stream text from a model; prints tokens per second and the cache's bytes."""
    from transformers import TextStreamer

    from sweeps.opening import open_model

    opened = open_model(what, device=_device(device))
    inputs = opened.tokenizer(prompt, return_tensors="pt").to(opened.model.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    started = time.perf_counter()
    made = opened.model.generate(
        **inputs,
        max_new_tokens=tokens,
        streamer=TextStreamer(opened.tokenizer),
        return_dict_in_generate=True,
        **sampling,
    )
    new = made.sequences.shape[1] - inputs["input_ids"].shape[1]
    cache = made.cache if hasattr(made, "cache") else made.past_key_values  # its older name
    size = getattr(cache, "nbytes", None)
    shown = "" if size is None else f", cache {size / 2**20:.2f} MiB after {made.sequences.shape[1]:,} tokens"
    say(f"{new / (time.perf_counter() - started):.1f} tokens/s{shown}")


def train(
    what: str = WHAT,
    out: Path = OUT,
    recipe: str = typer.Option("gdn 56+8", help="mechanism [budget] [adaptation] [merge] [layers], e.g. 'gdn 56+8 conv hardest:0.2'"),
    tokens: str = typer.Option("10.24M", help="training tokens"),
    sequence_length: int = typer.Option(4096, help="tokens of a sequence"),
    batch_size: int = typer.Option(1, help="sequences of an optimiser step"),
    learning_rate: float = typer.Option(0.0, help="0: the paper's (2e-3, with LoRA 5e-4)"),
    warmup_steps: int = typer.Option(100, help="optimiser steps of linear warm-up"),
    objective: str = typer.Option("ce", help="ce, kl, layerwise, or a chain such as layerwise:1M,ce:9M"),
    backbone: str = typer.Option("full", help="how frozen layers are kept: full, int8 (needs golinear[int8])"),
    data: str = typer.Option("auto", help="training text: auto, local:PATH, hub:NAME, self"),
    seed: int = typer.Option(1, help="of start values and the order of the text"),
    micro_batch: int = typer.Option(None, help="sequences in one forward; default: the whole batch"),
    checkpoint_activations: float = typer.Option(0.0, help="share of the layers to recompute from the start; else when needed"),
    shard_weights: bool = typer.Option(False, help="under torchrun: spread the frozen weights over the ranks"),
    isolate_documents: bool = typer.Option(False, help="packed documents do not see each other"),
    checkpoint_minutes: float = typer.Option(5.0, help="between checkpoints; there is one at the end anyhow"),
    device: str = DEVICE,
) -> None:
    """Linearize and train one model outside any sweep; run again, it goes on from the folder's last checkpoint."""
    from linear_core.settings import TrainSettings
    from linear_core.train import train_command
    from sweeps import parameters
    from sweeps.commands.console import progress_bar

    settings = TrainSettings(
        tokens=parameters.tokens(tokens),
        sequence_length=sequence_length,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        objective=objective,
        isolate_documents=isolate_documents,
        backbone=backbone,
    )
    with progress_bar() as on_progress:
        result = train_command(
            what, recipe, out, settings=settings, data=data, seed=seed, device=device, micro_batch=micro_batch,
            checkpoint_activations=checkpoint_activations, shard_weights=shard_weights,
            checkpoint_minutes=checkpoint_minutes, on_progress=on_progress,
        )  # fmt: skip
    if os.environ.get("RANK", "0") != "0":  # of torchrun
        return
    loss = "" if result.loss is None else f", loss {result.loss:.3f}"
    console.print(
        f"{result.tokens_seen:,} tokens in {result.seconds:.0f} s ({result.tokens_per_second:,.0f} tokens/s){loss}; {out}",
        highlight=False,
    )


def evaluate(
    what: str = WHAT,
    tasks: str = typer.Option(..., help="name[@length][:limit], e.g. lambada_openai:100,niah_single_1@1024:20,ruler"),
    limit: str = typer.Option(None, help="items a task, for tasks that name none"),
    lengths: str = typer.Option(None, help="prompt lengths of RULER tasks that name none"),
    batch_size: str = typer.Option("auto", help="rows in one forward"),
    backbone: str = typer.Option("", help="full, int8; default: as the cell was trained, full for a base model"),
    device: str = DEVICE,
    json: bool = JSON,
) -> None:
    """Score a model, a folder or a cell by the same code as a sweep."""
    from rich.table import Table

    from linear_core.evaluate.run import check_task, evaluate_task
    from sweeps import parameters
    from sweeps.opening import open_model

    specs = parameters.tasks(tasks, limit=limit, lengths=lengths)
    for spec in specs:
        check_task(spec)
    opened = open_model(what, device=_device(device), backbone=backbone)
    size = int(batch_size) if batch_size.isdigit() else batch_size
    found = [score for spec in specs for score in evaluate_task(opened.model, opened.tokenizer, spec, batch_size=size)]
    if json:
        console.print_json(data=[{**score.to_dict(), "details": {}} for score in found])
        return
    rows = Table("task", "metric", "value", "± stderr", "items", "source", box=None)
    for score in found:
        value = "–" if score.value is None else f"{score.value:.4g}"
        error = "" if score.stderr is None else f"{score.stderr:.2g}"
        rows.add_row(
            score.task.label, score.metric, value, error, str(score.samples or ""), score.reason or score.source
        )
    console.print(rows)


def bench(
    context: typer.Context,
    name: str = typer.Argument(help="which: mechanisms, forms, train, decode, prefill, memory, evaluate, plan, orchestration"),
) -> None:
    """Measure speed and memory on this machine against full attention; golinear bench NAME --help says more."""
    import importlib
    import pkgutil

    import linear_core.bench

    known = [module.name for module in pkgutil.iter_modules(linear_core.bench.__path__) if module.name != "report"]
    if name not in (*known, *MORE_BENCHES):
        raise ValueError(f"bench {name!r} is not known; allowed: {', '.join((*known, *MORE_BENCHES))}")
    main = MORE_BENCHES.get(name) or importlib.import_module(f"linear_core.bench.{name}").main
    if main(context.args):
        raise Refused(f"bench {name}: not everything was as it should be")


def _device(text: str) -> str:
    import torch

    return text or ("cuda" if torch.cuda.is_available() else "cpu")
