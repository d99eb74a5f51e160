"""The end of a sweep in words, tables and figures: a page in a folder, the same in MLflow, and a Prefect artifact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact

from sweeps import render, report, services
from sweeps.home import home
from sweeps.study import Study


def reports_folder(sweep_id: str) -> Path:
    """Where a sweep's report lies on this machine."""
    return home() / "reports" / sweep_id


def publish_table(found: Study, sweep_id: str, tracker: Any, parent: str, runs: Sequence[str]) -> str:
    """The table as a Prefect artifact and as MLflow's artifact and note (``runs``: of its finished cells, to be compared
    there); returns it as text for the log."""
    table = found.table()
    markdown = render.render(table, "markdown")
    page = services.urls().get("mlflow")
    link = f"; [in MLflow]({page}/#/experiments/{tracker.experiment_id}/runs/{parent})" if page else ""
    create_markdown_artifact(markdown, key="table", description=f"scaling table of {found.name}{link}")
    tracker.log_text(parent, markdown, "table.md")
    tracker.note_sweep(parent, sweep_id, markdown, runs)
    return render.render(table, "text")


def publish_report(found: Study, sweep_id: str, tracker: Any, parent: str) -> Path:
    """The report as a page on this machine, as files of the MLflow run, and as a Prefect artifact that links to both."""
    page = report.write(found, reports_folder(sweep_id))
    for file in (page, page.parent / "study.json"):
        tracker.log_text(parent, file.read_text(encoding="utf-8"), f"report/{file.name}")
    links = [f"- the page with figures, on the machine that ran the sweep: `{page}`"]
    if mlflow := services.urls().get("mlflow"):
        run = f"{mlflow}/#/experiments/{tracker.experiment_id}/runs/{parent}/artifacts/report/index.html"
        links.append(f"- the same page in MLflow: [{run}]({run})")
    text = "\n".join([report.markdown(found), "", *links, ""])
    create_markdown_artifact(text, key="report", description=f"report of {found.name}")
    return page
