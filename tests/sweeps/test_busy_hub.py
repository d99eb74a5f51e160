"""A hub that answers 429 is not an absent hub: nothing is planned under another name, and the reason is said."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.core.hub_stand_in import hub


@pytest.mark.parametrize(("data", "said"), [("self", "does not say now which revision"), ("auto", "the hub is busy")])
def test_a_busy_hub_refuses_the_plan(data: str, said: str, tmp_path: Path) -> None:
    busy = threading.Event()
    busy.set()
    command = [sys.executable, "-m", "flows.cli", "plan", "ablation", "--models=qwen3-0.6b-base", "--recipes=gdn 4+2", f"--data={data}"]
    with hub({}, busy=busy) as environment:
        homes = {name: str(tmp_path) for name in ("HF_HOME", "GOLINEAR_HOME", "GOLINEAR_CACHE")}
        here = {k: v for k, v in environment.items() if k != "GOLINEAR_DATA"} | homes
        done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode and said in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr
