"""golinear diagnose: why some layers and tokens are hard to linearize (recipe section 6), as tables and figures."""

from __future__ import annotations

from pathlib import Path

import typer

TEXT = "tokens of held-out text, the perplexity task's; memory does not grow with them"


OUT = typer.Option(..., "-o", "--out", help="folder for layers.csv, positions.csv, bins.csv and the figures")


def add_to(app: typer.Typer) -> None:
    app.command()(diagnose)


def diagnose(
    what: str = typer.Argument(help="registry name, hub id, folder, or a cell's key"),
    out: Path = OUT,
    tokens: str = typer.Option("32k", help=TEXT),
    length: int = typer.Option(512, help="tokens of a window, 2 to 2048"),
    share: float = typer.Option(0.2, help="of the layers to name as the hardest"),
    device: str = typer.Option("", help="cpu, cuda, …; default: cuda where there is one"),
) -> None:
    """Key concentration and projection residual of every layer, its error (of a linearized model), and the hardest."""
    from rich.table import Table

    from linear_core.diagnostics import MOST_TOKENS, draw
    from linear_core.diagnostics import diagnose as measure
    from linear_core.evaluate.offline import redirect
    from linear_core.evaluate.run import data_source
    from linear_core.evaluate.scores import TaskSpec
    from linear_core.evaluate.windows import heldout_windows
    from sweeps import parameters
    from sweeps.commands.console import console
    from sweeps.commands.models import _device
    from sweeps.opening import open_model

    if not 2 <= length <= MOST_TOKENS or not 0 < share <= 1:
        raise ValueError(f"length must be 2 to {MOST_TOKENS} and share above 0 and at most 1, not {length} and {share}")
    text = TaskSpec(name="perplexity", limit=max(parameters.tokens(tokens), length), length=length)
    source, available, reason = data_source(text)
    if not available:
        raise ValueError(reason)
    opened = open_model(what, device=_device(device))
    with redirect():
        windows = heldout_windows(text, opened.tokenizer).tokens
    found = measure(opened.model, windows)
    found.save(out)
    figures = draw(found, out)
    rows = Table("layer", "concentration", "residual", "hardness", "nMSE", box=None)
    hard = found.hardest(share)
    for i, layer in enumerate(found.layers):
        values = (found.concentration[i], found.residual[i], found.hardness[i], found.nmse[i] if found.nmse else None)
        shown = ["–" if value is None else f"{value:.4g}" for value in values]
        rows.add_row(str(layer), *shown, style="bold" if layer in hard else "")
    console.print(rows)
    console.print(
        f"{found.tokens:,} tokens; {source}\nhardest: list:{','.join(map(str, hard))}\n"
        f"wrote {', '.join(path.name for path in figures)} and tables to {out}", highlight=False, soft_wrap=True,
    )  # fmt: skip
