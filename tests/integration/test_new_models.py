"""The flow `new-models` against a stand-in of the hub, with a real Prefect server that it starts sweeps on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import PREFECT_API_URL

from sweeps import services
from tests.flows.model_hub import model, model_hub

pytestmark = [pytest.mark.usefixtures("services_up"), pytest.mark.timeout(300)]
MODELS = [
    model("Qwen/Qwen9-1B-Base", days=2, size=1_000_000_000),
    model("Qwen/Qwen9-2B-Base", days=3, size=2_000_000_000, sha="b"),
    model("Qwen/Qwen9-1B", days=1),
    model("Qwen/Qwen9-99B-Base", size=99_000_000_000),
    model("Qwen/Qwen9-1B-FP8-Base", quantization_config={"quant_method": "fp8"}),
    model("Qwen/Qwen9-Code-Base", auto_map={"AutoModel": "code.Model"}),
    model("Qwen/Qwen9-Old-Base", days=400),
    model("Qwen/Qwen9-Moe-Base", model_type="qwen9_moe"),
    model("Qwen/Qwen9-Mine-Base", licence="secret-sauce"),
    model("Qwen/Qwen9-Gguf-Base", size=None),
    model("Other/Qwen9-3B-Base"),
    model("meta-llama/Llama-9-1B-Base", gated=True, licence="llama3.1"),
]
WHY_NOT = {
    "Qwen9-1B": "its name is none of", "Qwen9-99B-Base": "99,000,000,000 parameters; at most", "Qwen9-1B-FP8-Base": "quantized (fp8)",
    "Qwen9-Code-Base": "remote code is off", "Qwen9-Old-Base": "made 400 days ago", "Qwen9-Moe-Base": "family qwen9_moe",
    "Qwen9-Mine-Base": "licence secret-sauce", "Qwen9-Gguf-Base": "no safetensors", "Llama-9-1B-Base": "gated: accept",
}  # fmt: skip
RUN = """
import json, sys
from flows.new_models import new_models
for asked in json.loads(sys.argv[1]):
    state = new_models(**asked, return_state=True)
    print("STATE", state.type.value, state.message)
"""


@pytest.fixture(scope="module")
def idle() -> str:
    """sweep/idle: like sweep/ablation, in a pool that no worker serves, so that what is started stays to be looked at."""
    with get_client(sync_client=True) as client:
        like = client.read_deployment_by_name("sweep/ablation")
        client.create_work_pool(WorkPoolCreate(name="idle", type="process"))
        client.create_deployment(
            flow_id=like.flow_id, name="idle", work_pool_name="idle", entrypoint=like.entrypoint,
            parameters={"tokens": 4096, "recipes": "gdn 4+2"}, parameter_openapi_schema=like.parameter_openapi_schema,
        )  # fmt: skip
    return "sweep/idle"


def watch(hub_url: str, tmp_path: Path, *runs: dict[str, Any], **env: str) -> str:
    """Runs of the flow as a worker would do them, in a process that takes the stand-in for the hub. Its output."""
    common = {"organisations": "Qwen,meta-llama", "names": "*-Base", "deployment": "sweep/idle"}
    asked = [common | changes for changes in runs]
    kept = {k: v for k, v in services.environment().items() if not k.startswith("HF_")}
    kept |= {"PREFECT_API_URL": PREFECT_API_URL.value(), "HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-u", "-c", RUN, json.dumps(asked)]
    done = subprocess.run(
        command, env=kept | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return done.stdout


def started() -> list[dict[str, Any]]:
    """Parameters of what runs of sweep/idle were made for, oldest first."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("sweep/idle")
        runs = [run for run in client.read_flow_runs(limit=200) if run.deployment_id == deployment.id]
    return [run.parameters for run in sorted(runs, key=lambda run: run.created)]


def artifact() -> str:
    """The newest summary."""
    from prefect.artifacts import Artifact

    found = Artifact.get("new-models")
    assert found is not None
    return str(found.data)


def test_each_new_model_is_started_once_and_the_rest_says_why_not(idle, tmp_path):
    from prefect.blocks.system import Secret

    with model_hub(MODELS) as (url, hub):
        Secret(value=f"{url}/told/hush-hush").save("told")
        told = {"notify": "secret/told", "sweep": {"tokens": 8192}}
        listed, first = watch(url, tmp_path, {"dry_run": True}, told).split("STATE COMPLETED 1 of 11 would be started")
        assert "left for the next run" in listed and "Other/" not in listed
        for name, reason in WHY_NOT.items():
            (row,) = [line for line in artifact().splitlines() if f"/{name} |" in line]
            assert reason in row and reason in listed
        assert "STATE COMPLETED 1 of 11 started: Qwen9-1B-Base" in first
        assert "hush" not in first and "Qwen9-1B-Base" in hub.told[0]["text"] and "Completed" in hub.told[0]["text"]
        (made,) = started()
        assert made == {"models": "Qwen/Qwen9-1B-Base", "name": "Qwen9-1B-Base aaaaaaaa", "tokens": 8192,
                        "recipes": "gdn 4+2", "notify": "secret/told"}  # fmt: skip

        more = watch(url, tmp_path, {"at_most": 5}, {"at_most": 5}, HF_TOKEN="hf_canary")
        assert "2 of 11 started: Llama-9-1B-Base, Qwen9-2B-Base" in more and "0 of 11 started" in more
        assert ("/api/models", "Bearer hf_canary") in hub.seen and "hf_canary" not in more
        hub.models["Qwen/Qwen9-1B-Base"]["sha"] = "d" * 40  # a new revision
        assert "1 of 11 started: Qwen9-1B-Base" in watch(url, tmp_path, {"at_most": 5})
        assert [made["models"].split("/")[1] for made in started()] == [
            "Qwen9-1B-Base", "Llama-9-1B-Base", "Qwen9-2B-Base", "Qwen9-1B-Base",
        ]  # fmt: skip

        hub.broken.append(403)
        failed = watch(url, tmp_path, {}, GOLINEAR_WEBHOOK_URL=f"{url}/told/hush-hush")
        assert "STATE FAILED" in failed and "the hub does not list the models of Qwen (HTTP 403)" in failed
        assert "Failed" in hub.told[-1]["text"] and "hush" not in failed


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"families": "gpt2"}, "allowed: llama, qwen3"),
        ({"max_parameters": "big"}, "write max_parameters=8B"),
        ({"deployment": "sweep/none"}, "prefect deployment ls"),
        ({"deployment": "new-models/watch"}, "allowed: sweep/ablation"),
        ({"sweep": {"recipes": "gdn 64"}}, "56+8"),
        ({"source": "/no/such"}, "allowed: hub, or a folder"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(idle, changes, allowed):
    from flows.new_models import new_models

    state = new_models(**{"deployment": "sweep/idle", **changes}, return_state=True)
    assert state.is_failed() and allowed in state.message


def test_a_url_as_block_is_refused_without_being_repeated(idle):
    from flows.new_models import new_models

    state = new_models(notify="https://hooks.example/hush", return_state=True)
    assert state.is_failed() and "GOLINEAR_WEBHOOK_URL" in state.message and "hush" not in state.message


@pytest.mark.parametrize("kind", ["webhook", "custom-webhook"])
def test_blocks_that_are_told(idle, kind, caplog):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.blocks.webhook import Webhook

    from flows.notify import on_end

    ended = SimpleNamespace(name="Completed", message="1 done")
    with model_hub([]) as (url, hub):
        text = {"text": "{{subject}} {{body}}"}
        block = {
            "webhook": Webhook(url=f"{url}/hush"),
            "custom-webhook": CustomWebhookNotificationBlock(name="x", url=f"{url}/hush", json_data=text),
        }[kind]
        block.save("told-too", overwrite=True)
        run = SimpleNamespace(name="red-fox", parameters={"notify": f"{kind}/told-too"})
        on_end(SimpleNamespace(name="sweep"), run, ended)
        assert hub.told[0]["text"].startswith("golinear sweep red-fox: Completed") and "1 done" in hub.told[0]["text"]
    on_end(SimpleNamespace(name="sweep"), run, ended)  # nobody is there any more
    assert "nobody was told" in caplog.text and "hush" not in caplog.text


def test_a_folder_of_models(idle, world):
    from flows.new_models import new_models

    before = len(started())
    asked = {
        "source": str(Path(world.model).parent),
        "licences": "any",
        "min_parameters": 0,
        "deployment": "sweep/idle",
    }
    state = new_models(**asked, return_state=True)
    assert state.message == "1 of 1 started: tiny" and started()[before]["models"] == world.model
    assert new_models(**asked, return_state=True).message == "0 of 1 started"


def test_the_deployment_is_scheduled_and_late_runs_do_not_pile_up(services_up):
    with get_client(sync_client=True) as client:
        watch = client.read_deployment_by_name("new-models/watch")
    assert watch.global_concurrency_limit.limit == 1
    assert watch.concurrency_options.collision_strategy == "CANCEL_NEW"
    assert [(s.schedule.cron, s.active) for s in watch.schedules] == [("17 5 * * *", False)]
