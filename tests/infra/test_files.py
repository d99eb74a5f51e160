"""Every file under infra/ is what its reader expects, agrees with the others, and holds no secret."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from tests.infra.kuberay import KINDS

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
MANIFESTS = sorted((INFRA / "k8s").glob("*.yaml"))
SETTINGS = dict(re.findall(r"^(\w+)=(.*)$", (INFRA / "golinear.env.example").read_text(), re.M))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("name", ["vms", "aws"])
def test_launcher_files_fit_rays_own_schema(name):
    import ray
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read(INFRA / "ray" / f"{name}.yaml")
    jsonschema.validate(config, json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text()))
    filled = prepare_config(config)
    validate_config(filled)
    assert filled["max_workers"] > 0
    start = " ".join(filled["head_start_ray_commands"])
    assert "--dashboard-host=127.0.0.1" in start and "--autoscaling-config" in start
    assert any("--env-file=/etc/golinear.env" in option for option in filled["docker"]["run_options"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_have_the_fields_of_their_kind(path):
    manifest = read(path)
    checked = KINDS[manifest["kind"]].model_validate(manifest)
    assert checked.metadata.namespace == "golinear"


def test_a_misspelt_field_would_be_noticed():
    manifest = read(INFRA / "k8s" / "rayjob.yaml")
    manifest["spec"]["activeDeadlineSecond"] = manifest["spec"].pop("activeDeadlineSeconds")
    with pytest.raises(ValidationError, match="activeDeadlineSecond"):
        KINDS["RayJob"].model_validate(manifest)


def test_a_job_ends_in_time_and_its_command_is_one_of_ours():
    job = read(INFRA / "k8s" / "rayjob.yaml")["spec"]
    assert job["shutdownAfterJobFinishes"] and 0 < job["activeDeadlineSeconds"] <= 7 * 86400
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["golinear", "run", "ablation"]
    from sweeps.request import build

    options = {word[2:].replace("-", "_"): value for word, value in zip(words[3::2], words[4::2], strict=True)}
    assert build("ablation", **options).cells


def test_versions_and_names_agree():
    pinned = dict(re.findall(r"^([\w-]+)==(.*)$", (ROOT / "constraints.txt").read_text(), re.M))["ray"]
    assert pinned == version("ray")
    specs = [
        read(INFRA / "k8s" / "raycluster.yaml")["spec"],
        read(INFRA / "k8s" / "rayjob.yaml")["spec"]["rayClusterSpec"],
    ]
    assert {spec["rayVersion"] for spec in specs} == {pinned}
    everything = "\n".join(path.read_text() for path in MANIFESTS)
    assert set(re.findall(r"image: (\S+)", everything)) == {"REGISTRY/golinear:TAG"}
    assert set(re.findall(r"secretRef: {name: ([\w-]+)}", everything)) == {"golinear-env"}
    cluster = read(INFRA / "k8s" / "raycluster.yaml")["metadata"]["name"]
    worker = read(INFRA / "k8s" / "worker.yaml")["spec"]["template"]["spec"]["containers"][0]
    env = {variable["name"]: variable for variable in worker["env"]}
    assert env["RAY_API_SERVER_ADDRESS"]["value"] == f"http://{cluster}-head-svc:8265"
    assert env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == cluster


def test_the_pools_template_gives_the_worker_a_job():
    from prefect.utilities.templating import apply_values
    from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

    template = json.loads((INFRA / "prefect" / "ray-pool.json").read_text())
    usual = ProcessWorker.get_default_base_job_template()
    assert set(template["job_configuration"]) == set(usual["job_configuration"])
    jsonschema.Draft202012Validator.check_schema(template["variables"])
    defaults = {name: v["default"] for name, v in template["variables"]["properties"].items() if "default" in v}

    def made(**values: Any) -> ProcessJobConfiguration:
        return ProcessJobConfiguration(**apply_values(template["job_configuration"], {**defaults, **values}))

    assert made().command == "python -m flows.submit" and made().env == {}
    assert made(ray_address="http://head:8265").env == {"RAY_API_SERVER_ADDRESS": "http://head:8265"}


def test_deployments_of_the_cluster_are_those_of_the_checkout():
    def told(file: dict[str, Any]) -> dict[str, Any]:
        return {d["name"]: (d["entrypoint"], d["parameters"].get("grid")) for d in file["deployments"]}

    here, there = read(ROOT / "prefect.yaml"), read(INFRA / "prefect" / "prefect.yaml")
    assert told(here) == told(there)
    assert {d["work_pool"]["name"] for d in there["deployments"]} == {"ray"}
    folder = there["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"]
    assert f"WORKDIR {folder}\n" in (INFRA / "Dockerfile").read_text()


def test_compose_binds_to_loopback_and_takes_its_secrets_from_the_environment():
    text = (INFRA / "compose" / "compose.yaml").read_text()
    services = read(INFRA / "compose" / "compose.yaml")["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 4 and all(port.startswith("${BIND:-127.0.0.1}:") for port in ports)
    for name, service in services.items():
        for variable, value in (service.get("environment") or {}).items():
            if re.search(r"PASSWORD|SECRET|AUTH|_URL$|_URI$", variable):
                assert "${" in value or not re.search(r"://[^/]*:[^/]*@", value), (name, variable)
        assert service["image"] and set(service.get("depends_on", {})) <= set(services)
    used = set(re.findall(r"\$\{(\w+)", text))
    told = (INFRA / "compose" / "compose.env.example").read_text()
    assert used == set(re.findall(r"^(?:# )?([A-Z_]+)=", told, re.M))
    assert {name for name in used if f"${{{name}:?" in text} == set(re.findall(r"^([A-Z_]+)=$", told, re.M))
    databases = (INFRA / "compose" / "databases.sql").read_text()
    assert set(re.findall(r"@postgres:5432/(\w+)", text)) == set(re.findall(r"CREATE DATABASE (\w+);", databases))


def test_the_image_is_built_from_files_that_are_there():
    text = (INFRA / "Dockerfile").read_text().replace("\\\n", "")
    words = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENV", "USER", "CMD"}
    assert {word for word, _ in words} <= known and words[0][0] == "FROM"
    users = [rest for word, rest in words if word == "USER"]
    assert users == ["golinear"]  # the last word on who runs is not root
    for word, rest in words:
        if word == "COPY":
            sources = [part for part in rest.split()[:-1] if not part.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), rest
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".golinear", "*.env", "prefect.toml"} <= set(ignored)


def test_no_file_holds_a_secret_and_git_keeps_the_filled_in_ones_out():
    import subprocess

    for name, value in SETTINGS.items():
        if re.search(r"TOKEN|SECRET|AUTH|WEBHOOK", name):
            assert value == "", name
    assert "PASSWORD@" in SETTINGS["GOLINEAR_DATABASE_URL"]
    filled = ["infra/golinear.env", "infra/compose/.env"]
    done = subprocess.run(["git", "check-ignore", *filled], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 128:  # not a git checkout
        assert done.stdout.split() == filled
