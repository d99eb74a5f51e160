"""`golinear up`: what it starts, starts once, and lets plain Prefect commands reach."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from sweeps import queries, services
from sweeps.store import Store

pytestmark = pytest.mark.timeout(300)


def test_up_again_reuses_what_lives(services_up):
    again = services.up(obtain_model=False)
    assert {name: service.pid for name, service in again.items()} == {name: s.pid for name, s in services_up.items()}
    assert httpx.get(f"{services_up['mlflow'].url}/health").status_code == 200
    assert "127.0.0.1" in Path("prefect.toml").read_text()
    settings = httpx.get(f"{services_up['prefect'].url}/ui-settings").json()
    assert settings["api_url"] == "/api", "Prefect's page asks its own server, whatever port that has"


def test_a_plain_prefect_command_runs_the_deployment(services_up, world):
    parameters = {
        "models": world.model, "recipes": "none 4+2", "tokens": 128, "sequence_length": 64, "warmup_steps": 1,
        "tasks": "perplexity:128", "name": "deployed",
    }  # fmt: skip
    command = ["prefect", "deployment", "run", "sweep/ablation", "--watch", "--params", json.dumps(parameters)]
    env = {k: v for k, v in services.environment().items() if not k.startswith("PREFECT_")}  # prefect.toml says it all
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sweep_id, sweep = queries.load_sweep(Store(), "deployed")
    assert queries.sweep_state(Store(), sweep_id) == "completed"
    assert {key for key, _, _ in queries.scores_of(Store())} >= {cell.train_key for cell in sweep.cells}


def test_down_stops_exactly_that(services_up, monkeypatch, tmp_path):
    mine = services_up["worker"]
    monkeypatch.setenv("GOLINEAR_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    services.down()  # another checkout's
    assert mine.alive
    stale = services.Running("worker", mine.pid, mine.started - 1000, "", "")
    assert not stale.alive  # a pid that was given anew is nobody we started
