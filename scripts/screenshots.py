"""Pictures of the MLflow and Prefect pages for the documentation: python scripts/screenshots.py

Runs a sweep of 40 cells on a tiny random model through the services in a folder of its own, opens the pages in headless
Chromium (which must be installed) and writes docs/images/*.png. Takes a few minutes; leaves nothing running.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RECIPES = ("gla 0+0,gla 8+0,gla 6+2,kgla 0+0,kgla 8+0,kgla 6+2,gdn 0+0,gdn 8+0,gdn 6+2,gdn 6+2 conv,gdn 6+2 mass,"
           "none 8+0,none 6+2")  # fmt: skip
SWEEP = {"recipes": RECIPES, "seeds": "1,2,3", "tokens": "4096", "sequence_length": "128", "batch_size": "2",
         "warmup_steps": "2", "tasks": "perplexity:2048,agreement:2048,attribution:1024", "name": "tiny"}  # fmt: skip
# of MLflow's page, as after a click each: the assistant's panel closed, menus for training
SETTINGS = {"mlflow.assistant.panelOpen_v1": "false", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
            "mlflow.workflowType_v1": '"machine_learning"'}  # fmt: skip
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 128  # of a palette: pages have few, and files stay small


class Browser:
    """One page of a headless Chromium, driven through its debugging port."""

    def __init__(self, socket: Any):
        self._socket, self._ids = socket, itertools.count(1)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (said := json.loads(self._socket.recv(timeout=120))).get("id") != number:
            pass
        return said.get("result", {})

    def run(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, awaitPromise=True)["result"].get("value")

    def open(self, url: str, wants: str, *, width: int = 1400, height: int = 900) -> None:
        """Open a page and wait until it shows the text ``wants``. Raises RuntimeError when it does not within a minute."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url="about:blank")  # a new hash alone would not load the page anew
        self.call("Page.navigate", url=url)
        self.wait(
            f"document.body && document.body.innerText.includes({json.dumps(wants)})", f"{url} shows no {wants!r}"
        )

    def wait(self, script: str, otherwise: str) -> None:
        end = time.monotonic() + 60
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > end:
                raise RuntimeError(otherwise)
            time.sleep(0.5)

    def click(self, words: str, tags: str = "button,a,[role=tab],[role=menuitem]") -> None:
        """Click the first element that reads ``words`` (or is labelled so)."""
        this = f"[...document.querySelectorAll({json.dumps(tags)})].find(e => (e.ariaLabel || e.innerText).trim() == {json.dumps(words)})"
        self.wait(this, f"nothing reads {words!r}")
        self.run(f"{this}.click()")

    def picture(self, path: Path, *, settle: float = 3.0) -> None:
        from PIL import Image

        time.sleep(settle)  # charts draw after their data is there
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        Image.open(io.BytesIO(data)).convert("RGB").quantize(COLOURS).save(path, optimize=True)
        sys.stderr.write(f"{path} {path.stat().st_size // 1024} KiB\n")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit(f"no {' or '.join(CHROMIUM)} on PATH; install Chromium")
    process = subprocess.Popen(
        [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0",
         f"--user-data-dir={folder}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = folder / "DevToolsActivePort"
        while not (port.exists() and port.read_text().strip()):
            if process.poll() is not None:
                raise SystemExit(f"{program} ended with status {process.returncode}")
            time.sleep(0.2)
        pages = httpx.get(f"http://127.0.0.1:{port.read_text().split()[0]}/json").json()
        with connect(next(p["webSocketDebuggerUrl"] for p in pages if p["type"] == "page"), max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(20)


def photograph(page: Browser, mlflow: str, prefect: str, out: Path) -> None:
    """Every picture of the documentation, from the newest sweep of the store."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
    from prefect.client.schemas.sorting import FlowRunSort

    from sweeps.tracking import prepare

    tracker = prepare("ablation")
    parent = next(tracker.search("tags.kind = 'sweep'"))
    sweep_id = parent.data.tags["sweep_id"]
    experiment = f"{mlflow}/#/experiments/{tracker.experiment_id}"
    page.open(mlflow, "Experiments")
    page.run(f"Object.assign(localStorage, {json.dumps(SETTINGS)})")
    page.open(f"{experiment}/runs/{parent.info.run_id}", "compare 40 cells")
    page.click("Expand description")
    page.picture(out / "mlflow-sweep.png")
    page.open(f"{experiment}/runs?viewStateShareKey={sweep_id}", "gla 0+0")
    page.picture(out / "mlflow-cells.png")
    page.open(f"{experiment}/runs?viewStateShareKey={sweep_id}&compareRunsMode=CHART", "Parallel", height=1300)
    page.picture(out / "mlflow-charts.png", settle=8)
    compared = re.findall(r"\]\((#/compare-runs[^)]*)\)", parent.data.tags["mlflow.note.content"])[0]
    page.open(f"{mlflow}/{compared}", "Parallel Coordinates Plot", height=1200)
    page.picture(out / "mlflow-compare.png", settle=6)
    page.open(f"{experiment}/runs/{parent.info.run_id}/artifacts/table.md", "agreement")
    page.picture(out / "mlflow-table.png")
    with get_client(sync_client=True) as client:
        flow_run = client.read_flow_runs(limit=1, sort=FlowRunSort.EXPECTED_START_TIME_DESC)[0]
        table = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]), key=ArtifactFilterKey(any_=["table"])
            )
        )[0]
    page.open(f"{prefect}/runs/flow-run/{flow_run.id}", "Parameters", height=1000)
    page.picture(out / "prefect-run.png", settle=6)
    page.open(f"{prefect}/artifacts/artifact/{table.id}", "tiny", height=1000)
    page.picture(out / "prefect-table.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--folder", type=Path, help="where to run; kept, so that a second call only takes the pictures")
    asked = parser.parse_args()
    out, folder = asked.out.absolute(), (asked.folder or Path(tempfile.mkdtemp(prefix="golinear-pictures-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("prefect.yaml", "flows", "sweeps", "linear_core"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(ROOT / name)
    os.chdir(folder)
    os.environ |= {
        "GOLINEAR_HOME": f"{folder}/home",
        "GOLINEAR_CACHE": f"{folder}/cache",
        "GOLINEAR_DATA": f"{folder}/data",
    }

    from sweeps import services
    from tests.integration.world import make_data, make_model

    if not (folder / "data").exists():
        make_model(folder / "tiny-llama")
        make_data(folder / "data")
    try:
        running = services.up(lambda line: sys.stderr.write(f"{line}\n"), obtain_model=False)
        os.environ |= services.environment(running["prefect"].url)
        parameters = [word for pair in SWEEP.items() for word in ("-p", "=".join(pair))]
        command = [str(Path(sys.executable).parent / "prefect"), "deployment", "run", "sweep/ablation", "--watch"]
        subprocess.run(
            [*command, "-p", f"models={folder}/tiny-llama", *parameters], check=True, stdout=subprocess.DEVNULL
        )
        with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
            photograph(page, running["mlflow"].url, running["prefect"].url, out)
    finally:
        services.down()
    if asked.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
