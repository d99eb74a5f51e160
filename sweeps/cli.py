"""The command line `golinear`. Starts without torch: every command imports what it needs when it runs."""

from __future__ import annotations

import logging
import os
import sys

import typer

from sweeps.commands import control, diagnose, kernels, models, reports, services, studies
from sweeps.commands.console import Refused, say

app = typer.Typer(
    name="golinear", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Turn pretrained transformers into linear-time models: convert, train, measure, and sweep.",
)  # fmt: skip
for group in (services, studies, reports, control, models, diagnose, kernels):
    group.add_to(app)


@app.callback()
def options(verbose: bool = typer.Option(False, "--verbose", "-v", help="say more, on standard error")) -> None:
    """Settings of every command."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")


NOISY = ("torchao", "torch.utils._pytree")  # warn when they are imported of what is no matter here


def _prepare() -> None:
    """Nothing on standard error but what a command says: no warnings of an import, no bars in a file. Threads that wait
    sleep: spinning ones made a CPU that others use too 30 times slower."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def main() -> None:
    """Entry point. Exit status 0 done, 1 refused or failed, 2 wrong input; one line on standard error, no traceback
    (GOLINEAR_TRACEBACK=1 shows it)."""
    _prepare()
    try:
        app()
    except (ValueError, Refused, RuntimeError, OSError, KeyError) as error:
        if os.environ.get("GOLINEAR_TRACEBACK"):
            raise
        say(f"golinear: {error.args[0] if isinstance(error, KeyError) else error}")
        sys.exit(2 if isinstance(error, ValueError) else 1)
