"""The flow `new-models`: new checkpoints on the hub or in a folder → those that fit the rules → a sweep of each.

Deployment (prefect.yaml): new-models/watch, on a schedule. In this process: `golinear watch`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed, State

from flows import notify as notifications
from sweeps import candidates, parameters, queries
from sweeps.candidates import Candidate, Rules
from sweeps.request import HELP, build
from sweeps.store import Store

Words = str | list[str]


@dataclass(frozen=True)
class Verdict:
    """A candidate and what becomes of it. ``fits``: it is to be started now, or would be."""

    candidate: Candidate
    fits: bool
    reason: str


@flow(
    name="new-models",
    description="Look for new base models and start a sweep of each that fits, once per revision.",
    on_completion=[notifications.on_end],
    on_failure=[notifications.on_end],
    on_crashed=[notifications.on_end],
)
def new_models(
    source: str = "hub",
    organisations: Words = "Qwen,meta-llama,HuggingFaceTB",
    families: Words = "qwen3,llama",
    names: Words = "*",
    licences: Words = "apache-2.0,mit,llama3.1",
    min_parameters: int | str = "100M",
    max_parameters: int | str = "9B",
    max_age_days: int | str = 90,
    at_most: int = 1,
    deployment: str = "sweep/ablation",
    sweep: dict[str, Any] | None = None,
    dry_run: bool = False,
    notify: str = "",
) -> State:
    """Start ``deployment`` for each new base model that fits, newest first, at most ``at_most`` a run.

    source: "hub" (HF_ENDPOINT, HF_TOKEN), or a folder of model folders, for which organisations do not count.
    names: shell patterns, e.g. "*-Base". licences: "any" allows all. max_age_days: 0 for any age. sweep: parameters of
    each sweep, over the deployment's own. dry_run: list them, start nothing. notify: the Prefect block that is told
    of the end (secret/NAME, webhook/NAME, slack-webhook/NAME), here and by each sweep.
    Raises ValueError, before anything starts, for whatever is not allowed, and when the hub cannot be read.
    """
    say = get_run_logger().info
    notifications.check(notify)
    if at_most < 1:
        raise ValueError(f"at_most must be at least 1, not {at_most}; to start nothing: dry_run=true")
    rules = Rules.of(
        families=families, names=names, licences=licences, min_parameters=min_parameters,
        max_parameters=max_parameters, max_age_days=max_age_days,
    )  # fmt: skip
    given = _parameters(deployment, sweep or {}, notify)
    build(**_request(given))  # what is wrong is said before the hub is asked
    store = Store()
    found = candidates.listed(source, parameters.items(organisations, "organisations"))
    verdicts = judge(found, rules, queries.started_models(store, deployment), given, at_most)
    for verdict in verdicts:
        if verdict.fits and not dry_run:
            say("%s: started as %s", verdict.candidate.model, _start(verdict.candidate, deployment, given, store))
        elif dry_run:
            say("%s: %s", verdict.candidate.model, verdict.reason)
    chosen = [verdict.candidate.name for verdict in verdicts if verdict.fits]
    create_markdown_artifact(
        summary(verdicts, deployment, dry_run), key="new-models", description=f"new base models for {deployment}"
    )
    told = f"{len(chosen)} of {len(found)} {'would be ' if dry_run else ''}started"
    return Completed(message=f"{told}: {', '.join(chosen)}" if chosen else told)


def judge(
    found: Iterable[Candidate], rules: Rules, known: set[tuple[str, str]], given: dict[str, Any], at_most: int
) -> list[Verdict]:
    """What becomes of each candidate, in their order. ``known``: (model, revision) that were started before."""
    verdicts: list[Verdict] = []
    for candidate in found:
        reason = rules.why_not(candidate)
        if not reason and (candidate.model, candidate.revision) in known:
            reason = f"started before at revision {candidate.revision}"
        if not reason and sum(verdict.fits for verdict in verdicts) >= at_most:
            verdicts.append(Verdict(candidate, False, f"fits; left for the next run (at_most={at_most})"))
            continue
        reason = reason or _why_not_swept(candidate, given)
        verdicts.append(Verdict(candidate, not reason, reason or f"fits: {candidate.parameters:,} parameters"))
    return verdicts


def summary(verdicts: Iterable[Verdict], deployment: str, dry_run: bool) -> str:
    """Markdown: every candidate with why or why not, those that fit in front."""
    started = "would start" if dry_run else "started"
    rows = [
        f"Sweeps by `{deployment}`.",
        "",
        "| model | revision | family | parameters | licence | |",
        "|---|---|---|--:|---|---|",
    ]
    for verdict in sorted(verdicts, key=lambda v: not v.fits):
        found = verdict.candidate
        size = "" if found.parameters is None else f"{found.parameters / 1e9:.2f}B"
        told = f"**{started}**" if verdict.fits else verdict.reason.replace("|", "\\|")
        rows.append(f"| {found.model} | {found.revision} | {found.family} | {size} | {found.licence} | {told} |")
    return "\n".join(rows)


def _parameters(deployment: str, own: dict[str, Any], notify: str) -> dict[str, Any]:
    """Of each sweep: the deployment's, replaced by ``own``. Raises ValueError when there is no such deployment."""
    if not deployment.startswith("sweep/"):
        raise ValueError(
            f"deployment {deployment!r} is none of the flow sweep; allowed: sweep/ablation, sweep/scaling, …"
        )
    with get_client(sync_client=True) as client:
        try:
            known = client.read_deployment_by_name(deployment)
        except (ObjectNotFound, ValueError):
            raise ValueError(
                f"deployment {deployment!r} is not on this Prefect server; allowed: those that `prefect deployment ls` lists"
            ) from None
    if "models" in own:
        raise ValueError("sweep: models is what this flow fills in; leave it out")
    return {**known.parameters, **own, **({"notify": notify} if notify else {})}


def _request(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What ``sweeps.request.build`` takes of a sweep's parameters."""
    return {name: value for name, value in {**given, **more}.items() if name in HELP or name == "grid"}


def _why_not_swept(candidate: Candidate, given: dict[str, Any]) -> str:
    """Why the sweep itself would refuse this model, by its whole config; "" when it would not."""
    try:
        build(**_request(given, models=candidate.model))
    except ValueError as error:
        return str(error)
    return ""


def _start(candidate: Candidate, deployment: str, given: dict[str, Any], store: Store) -> str:
    """Start the deployment and note it. Its key makes a run that died in between start nothing twice."""
    name = given.get("name") or f"{os.path.basename(candidate.model)} {candidate.revision[:8]}"
    run: Any = run_deployment(
        deployment,
        parameters={**given, "models": candidate.model, "name": name},
        tags=["new-models"],
        idempotency_key=f"new-models {candidate.model} {candidate.revision} {deployment}",
        timeout=0,
        as_subflow=False,
    )
    queries.note_started(store, deployment, candidate.model, candidate.revision, str(run.id))
    return str(run.name)
