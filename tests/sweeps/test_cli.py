"""The command line: what it refuses and how, what it prints, and that it starts without torch."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_helpers import pinned

from flows.cli import main
from linear_core.evaluate.scores import Score
from sweeps import queries
from sweeps.grids import ablation

MODELS = ["--models", "smollm2-135m"]


@pytest.fixture
def run(home, monkeypatch, capsys, text_folder):
    """Runs `golinear` in this process: (exit status, standard output, standard error)."""
    monkeypatch.setenv("GOLINEAR_DATA", str(text_folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["golinear", *arguments])
        try:
            main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("train_text", "heldout_text"):
        row = {"text": "the sea " * 500, "id": 0, "title": "the sea"}
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    return folder


def tiny_folder(folder: Path, model_type: str = "llama") -> Path:
    """A base model's folder as far as a plan looks at it."""
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "intermediate_size": 64, "vocab_size": 97, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": ["LlamaForCausalLM"], **shape})
    )
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_plan_as_json(run, tmp_path):
    model = str(tiny_folder(tmp_path / "tiny"))
    axes = ["--mechanisms", "gdn,gla", "--budgets", "64+0,56+8", "--tasks", "perplexity"]
    status, out, _ = run("plan", "ablation", "--models", model, *axes, "--json")
    assert status == 0
    cells = json.loads(out)["cells"]
    assert [cell["action"] for cell in cells] == ["run"] * 5
    assert {(cell["mechanism"], cell["budget"]) for cell in cells[1:]} == {
        (mechanism, budget) for mechanism in ("gdn", "gla") for budget in ("64+0", "56+8")
    }
    assert all({"key", "action", "reason"} <= set(cell) for cell in cells)
    reordered = ["--mechanisms", '["gla","gdn"]', "--budgets", "56+8,64+0", "--tasks", "perplexity"]
    again = json.loads(run("plan", "ablation", "--models", model, *reordered, "--json")[1])["cells"]
    assert {cell["key"] for cell in again} == {cell["key"] for cell in cells}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--models", "gpt-17"], "smollm2-135m"),
        (["--mechanisms", "gdm"], "gdn"),
        (["--adaptations", "convolution"], "none, conv, lora"),
        (["--tasks", "mmlus"], "mmlu"),
        (["--budgets", "64"], "56+8"),
        (["--budgets", "-1+0"], "56+8"),
        (["--budgets", "0+8"], "sinks only with a window"),
        (["--learning-rate", "nan"], "finite number"),
        (["--learning-rate", "12e4567"], "finite number"),
        (["--learning-rate", "-1e-3"], "finite number"),
        (["--tokens", "inf"], "10.24M"),
        (["--seeds", "1.5"], "1,2,3"),
        (["--mechanisms", "[gdn"], "mechanisms=gla,gdn"),
        (["--recipes", "gdn 56+8", "--budgets", "0+0"], "leave out budgets"),
        (["--data", "somewhere"], "local:PATH"),
    ],
)
def test_wrong_input_is_refused_with_what_is_allowed(run, arguments, said):
    status, out, err = run("plan", "ablation", *arguments)
    assert status == 2 and out == ""
    assert err.startswith("golinear: ") and said in err and "Traceback" not in err


def test_refusals_of_this_machine(run, tmp_path, monkeypatch):
    model = str(tiny_folder(tmp_path / "tiny"))
    status, _, err = run("plan", "ablation", "--models", model, "--tasks", "perplexity", "--gpus", "64")
    assert status == 1 and "wants 64 GPUs" in err
    other = str(tiny_folder(tmp_path / "other", model_type="mamba"))
    status, _, err = run("plan", "ablation", "--models", other)
    assert status == 2 and "llama" in err and "qwen3" in err
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path / "nowhere"))
    status, _, err = run("plan", "ablation", "--models", model)
    assert status == 2 and "GOLINEAR_DATA" in err


def test_unknown_names_elsewhere(run):
    assert run("table")[0] == 2
    assert "golinear status" in run("logs", "no-such-cell")[2]
    assert "allowed: " in run("bench", "sleeping")[2]
    assert "allowed: " in run("plan", "no-such-grid")[2]


def test_starts_without_torch_and_fast():
    code = (
        "import sys; sys.argv = ['golinear', '--help']\n"
        "from flows.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stderr.write(str(sorted({'torch', 'prefect', 'ray', 'mlflow', 'pandas'} & set(sys.modules))))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stderr == "[]"
    for command in (
        "doctor",
        "up",
        "down",
        "plan",
        "run",
        "table",
        "status",
        "logs",
        "forget",
        "retry",
        "train",
        "evaluate",
    ):
        assert command in done.stdout


def test_diff_says_whether_two_cells_scores_differ_by_more_than_chance(run, store):
    sweep = pinned(ablation("smollm2-135m", "gdn,gla", tasks="lambada_openai,piqa"))
    queries.save_sweep(store, "study-1", sweep)
    right = {"gdn": [1.0] * 60 + [0.0] * 40, "gla": [1.0] * 30 + [0.0] * 70}
    for cell in sweep.cells[1:]:
        claim = store.claim(cell.train_key, "me")
        store.publish(claim, cell, {})
        values = right[cell.recipe.mechanism]
        for task, key in sweep.score_keys(cell):
            kept = values if task.name == "lambada_openai" else values[:40]
            details = {"values": kept, "items": list(range(len(kept)))}
            store.put_scores(claim, key, [Score(task=task, metric="acc", value=sum(kept) / len(kept), details=details)])
        store.finish(claim)
    status, out, _ = run("diff", *(cell.train_key[-16:] for cell in sweep.cells[1:]))
    assert status == 0 and "recipe.mechanism gdn → gla" in out
    lambada, piqa = (
        next(line.split() for line in out.splitlines() if line.split()[:1] == [name])
        for name in ("lambada_openai", "piqa")
    )
    assert lambada[2:5] == ["60.00", "30.00", "−30.00"] and "real" in lambada and lambada[-1] == "McNemar"
    assert piqa[2:5] == ["100.00", "75.00", "−25.00"]
