"""Exports load by anyone: in a fresh process where golinear, fla and peft are not importable."""

import gzip
import json
import subprocess
import sys
import textwrap

import pytest
import torch

from linear_core.convert import convert, new_parameters
from linear_core.evaluate.offline import read_rows
from linear_core.export import export, export_delta, load_linearized
from linear_core.inspect import inspect_recipe
from linear_core.models import REGISTRY, resolve, revision
from linear_core.recipe import Recipe
from tests.core.hub_stand_in import hub
from tests.core.tiny import base, linearized, randomised, tokens

HIDE = """
    import importlib.machinery
    import os
    import sys
    HIDDEN = os.environ["HIDDEN"].split(",")
    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            return None if name.partition(".")[0] in HIDDEN else super().find_spec(name, path, target)
    sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("__editable__")]
    sys.meta_path[:] = [Finder if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""
OURS = "linear_core,sweeps,flows"
LOAD = """
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)
    ids = torch.load(sys.argv[2])
    with torch.no_grad():
        logits = model(ids).logits
    torch.save({"logits": logits, "generated": model.generate(ids, max_new_tokens=8, do_sample=False)}, sys.argv[3])
"""


def load_elsewhere(folder, ids, scratch):
    torch.save(ids, scratch / "ids.pt")
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(HIDE + LOAD),
        str(folder),
        str(scratch / "ids.pt"),
        str(scratch / "out.pt"),
    ]
    done = subprocess.run(
        command,
        cwd=scratch,
        capture_output=True,
        text=True,
        env={"HF_HOME": str(scratch / "hf"), "PATH": "/usr/bin:/bin", "HIDDEN": f"{OURS},fla,peft,lm_eval,prefect,ray"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(scratch / "out.pt")


@pytest.fixture
def base_folder(tmp_path):
    folder = tmp_path / "tiny-llama"
    base().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "recipe,family", [("gdn 6+3 conv mass", "qwen3"), ("hedgehog 6+3", "llama"), ("kgla 5+0 lora", "llama")]
)
def test_export_gives_the_same_logits_in_a_fresh_process(recipe, family, tmp_path, base_folder):
    model, ids = linearized(recipe, family), tokens(30)
    with torch.no_grad():
        expected = model(ids).logits
    generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    folder = export(model, None, resolve(str(base_folder)), tmp_path / "export")
    got = load_elsewhere(folder, ids, tmp_path)
    close = 1e-3 if "lora" in recipe else 1e-5  # a merged LoRA rounds otherwise
    torch.testing.assert_close(got["logits"], expected, atol=close, rtol=close)
    assert torch.equal(got["generated"], generated)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not list(folder.glob("*.bin")) and (folder / "README.md").read_text().startswith("---\nlicense:")


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [OURS, f"{OURS},fla,peft"], ids=["with fla", "without fla"])
def test_lm_eval_scores_an_export_where_golinear_is_not_installed(hidden, tmp_path, monkeypatch):
    """The command of the README, on SmolLM2; the data set comes over HTTP, from a stand-in for the hub."""
    from linear_core import smollm2
    from linear_core.evaluate.offline import task_files
    from linear_core.evaluate.run import evaluate_task
    from linear_core.evaluate.scores import TaskSpec
    from linear_core.evaluate.tasks import TASKS
    from linear_core.models import load, load_tokenizer

    files = task_files(TASKS["lambada_openai"])
    if files is None:
        pytest.skip("needs GOLINEAR_DATA with LAMBADA")
    rows = read_rows(files[0])[:20]  # a limit of ours takes a sample, the harness's the first ones
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / files[0].name, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path / "data"))
    found = resolve(str(smollm2.ensure()))
    model, tokenizer = randomised(convert(load(found), Recipe.parse("gdn 56+8 conv")), std=0.1), load_tokenizer(found)
    ours = evaluate_task(model, tokenizer, TaskSpec(name="lambada_openai"))
    folder = export(model, tokenizer, found, tmp_path / "export")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(HIDE))
    command = ["lm_eval", "--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32",
               "--tasks", "lambada_openai", "--limit", "20", "--output_path", str(tmp_path / "scores")]  # fmt: skip
    with hub({"EleutherAI/lambada_openai": [row["text"] for row in rows]}, split="test") as environment:
        environment |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(tmp_path / "site"), "HIDDEN": hidden}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        absent = subprocess.run(
            [sys.executable, "-c", "import linear_core"], cwd=tmp_path, env=environment, capture_output=True
        )
    assert absent.returncode and b"No module named 'linear_core'" in absent.stderr
    assert done.returncode == 0 and "lambada_openai" in done.stdout, done.stderr[-2000:]
    scores = json.loads(next((tmp_path / "scores").rglob("results_*.json")).read_text())["results"]["lambada_openai"]
    for score in ours:
        assert scores[f"{score.metric},none"] == pytest.approx(score.value, rel=1e-3), score.metric


def test_new_parameters_stay_float32_when_loaded_in_bfloat16(tmp_path, base_folder):
    folder = export(linearized("gdn 6+3 conv mass"), None, resolve(str(base_folder)), tmp_path / "export")
    from linear_core.convert import LinearizedLlamaForCausalLM

    model = LinearizedLlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in new_parameters(model).values()} == {torch.float32}
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert model(tokens(20)).logits.isfinite().all()


def test_delta_points_to_its_base(tmp_path, base_folder, monkeypatch):
    found = resolve(str(base_folder))
    model = randomised(convert(base(), Recipe.parse("gdn 6+3")))
    folder = export_delta(model, found, revision(found), tmp_path / "delta")
    assert sum(f.stat().st_size for f in folder.iterdir()) < 200_000
    (base_folder / "tokenizer_config.json").write_text("{}")
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: None)
    loaded, _ = load_linearized(folder)
    with torch.no_grad():
        assert torch.equal(loaded(tokens(20)).logits, model(tokens(20)).logits)
    pointer = json.loads((folder / "golinear.json").read_text())
    (folder / "golinear.json").write_text(json.dumps({**pointer, "revision": "0" * 16}))
    with pytest.raises(ValueError, match="was trained on tiny-llama revision 0000"):
        load_linearized(folder)


def test_export_refuses_a_folder_with_other_files(tmp_path, base_folder):
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not empty"):
        export(linearized("gdn 6+3"), None, resolve(str(base_folder)), tmp_path / "export")
    with pytest.raises(ValueError, match="holds no linearized model"):
        load_linearized(base_folder)


def test_inspect_counts_bytes():
    """The state alone is worth 512 tokens of bf16 keys and values at LLaMA-8B."""
    facts = inspect_recipe(REGISTRY["llama3.1-8b"].shape, Recipe.parse("gdn 56+8"))
    assert facts["state_is_worth_tokens"] == 512
    assert round(facts["new_parameters"] / 1e6, 2) == 8.52
    window_and_sinks = 32 * 64 * 2 * 8 * 128 * 2
    gate_inputs = 32 * 56 * (16 + 32) * 4
    assert facts["cache_bytes"] == facts["state_bytes"] + window_and_sinks + gate_inputs
    assert facts["by_length"][0]["full_attention_bytes"] == 32 * 2 * 8 * 128 * 2 * 1024
    mixed = inspect_recipe(REGISTRY["llama3.1-8b"].shape, Recipe(softmax_layers="uniform:0.25"))
    assert mixed["linearized_layers"] == 24 and mixed["by_length"][-1]["cache_bytes"] > mixed["cache_bytes"]
