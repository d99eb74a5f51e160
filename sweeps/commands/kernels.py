"""golinear kernels: compiled kernels of this kind of GPU as one file, for machines that need not compile them again."""

from __future__ import annotations

from pathlib import Path

import typer

from sweeps.commands.console import console

FILE = typer.Argument(help="the archive, e.g. kernels.tar.gz")


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="compiled kernels: what there is, pack it, unpack it elsewhere")
    for command in (show, pack, unpack):
        group.command()(command)
    app.add_typer(group, name="kernels")


def show() -> None:
    """Kind of machine, folders, number and size of the files."""
    from linear_core import kernel_archive
    from sweeps import kernels

    kernel_archive.use()
    found = kernel_archive.files()
    size = sum(path.stat().st_size for path in found.values()) / 2**20
    rows = {"kind": kernel_archive.key(), **{name: str(path) for name, path in kernel_archive.folders().items()}}
    rows |= {"files": f"{len(found)}, {size:.1f} MiB", "shared at": kernels.place() or "nowhere (GOLINEAR_KERNELS)"}
    for name, value in rows.items():
        console.print(f"{name:10} {value}", highlight=False, soft_wrap=True)


def pack(file: Path = FILE) -> None:
    """Write what was compiled here into one file."""
    from linear_core import kernel_archive

    kernel_archive.use()
    if not kernel_archive.files():
        raise ValueError(
            f"nothing was compiled on this machine yet: {', '.join(map(str, kernel_archive.folders().values()))}"
        )
    console.print(f"{kernel_archive.pack(file)} files in {file}", highlight=False)


def unpack(file: Path = FILE) -> None:
    """Add what another machine of this kind packed. It is code: take it from whom you would run a program of."""
    from linear_core import kernel_archive

    kernel_archive.use()
    console.print(f"{kernel_archive.unpack(file)} files added from {file}", highlight=False)
