"""golinear doctor, up, down: the machine and the services of this checkout."""

from __future__ import annotations

import typer

from sweeps.commands.console import Refused, console, say


def add_to(app: typer.Typer) -> None:
    for command in (doctor, up, down):
        app.command()(command)


def doctor(json: bool = typer.Option(False, "--json", help="as JSON")) -> None:
    """What this machine has and lacks, and how to mend it."""
    import dataclasses

    from rich.table import Table

    from sweeps.doctor import findings

    found = findings()
    if json:
        console.print_json(data=[dataclasses.asdict(finding) for finding in found])
    else:
        table = Table("", "check", "found", "how to mend it", box=None)
        signs = {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "missing": "[red]✗[/]"}
        for finding in found:
            table.add_row(signs[finding.state], finding.name, finding.found, finding.mend)
        console.print(table)
    if missing := [finding.name for finding in found if finding.state == "missing"]:
        raise Refused(f"missing: {', '.join(missing)}")


def up() -> None:
    """Start Prefect, its worker and the MLflow page, deploy the flows, obtain SmolLM2-135M; print the addresses."""
    from sweeps.services import up as start

    running = start(say)
    console.print(f"Prefect  {running['prefect'].url}\nMLflow   {running['mlflow'].url}", highlight=False)
    console.print("next     prefect deployment run sweep/ablation --watch", highlight=False)


def down() -> None:
    """Stop exactly what `golinear up` started."""
    from sweeps.services import down as stop

    stop(say)
