"""What all commands share: two consoles and the refusal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)
LINE_SECONDS = 10.0  # between progress lines in a log file


class Refused(Exception):
    """The request is understood and turned down: exit status 1."""


@contextmanager
def progress_bar() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function for a stage's progress (stage, done, total, unit, loss, …): a bar in a terminal, in a file a line
    every ten seconds."""
    if errors.is_terminal:
        with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[note]}"), console=errors) as bar:
            task = bar.add_task("", total=None, note="")

            def show(said: dict[str, Any]) -> None:
                bar.update(
                    task, description=said["stage"], completed=said["done"], total=said["total"], note=line(said)
                )

            yield show
        return
    last = time.monotonic()

    def write(said: dict[str, Any]) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            say(line(said))

    yield write


def line(said: dict[str, Any]) -> str:
    """``train 2,048/4,096 tokens, loss 3.214, 350 tokens/s``."""
    counts = f"{said.get('stage', '')} {said['done']:,}/{said['total']:,} {said.get('unit', '')}".strip()
    extra = [said["task"]] if "task" in said else []
    extra += [f"loss {said['loss']:.3f}"] if said.get("loss") is not None else []
    extra += [f"{said['tokens_per_second']:,.0f} tokens/s"] if said.get("tokens_per_second") else []
    return ", ".join([counts, *extra])


def say(text: str) -> None:
    """One progress line on standard error, so that standard output stays what was asked for."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)
