"""What all commands share: two consoles and the refusal."""

from __future__ import annotations

import sys

from rich.console import Console

console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)


class Refused(Exception):
    """The request is understood and turned down: exit status 1."""


def say(text: str) -> None:
    """One progress line on standard error, so that standard output stays what was asked for."""
    errors.print(text, highlight=False, markup=False, soft_wrap=True)
