"""Convert, train and evaluate a tiny real model on real folders, as a worker does."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from linear_core.evaluate.scores import TaskSpec
from linear_core.export import export, export_delta
from linear_core.models import Shape, resolve
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from linear_core.train import train_command
from sweeps import stages
from sweeps.cell import Cell
from sweeps.commands.diagnose import diagnose
from sweeps.grids import ablation, pin
from sweeps.opening import described
from sweeps.retries import cause_of

TRAIN = TrainSettings(tokens=6 * 64, sequence_length=32, batch_size=2, warmup_steps=1)
SHAPE = Shape(family="llama", hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, intermediate=64, vocab=300,
              tied=True, max_positions=256, rope_theta=1e4, rms_eps=1e-5)  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from linear_core.models import build

    folder = tmp_path_factory.mktemp("tiny")
    build(SHAPE, device="cpu").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<end>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "train.jsonl"
    path.write_text("".join(json.dumps({"text": f"Line {i} of a short story. " * 20}) + "\n" for i in range(600)))
    return f"local:{path}"


@pytest.fixture
def cells(model_folder: Path, text: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    monkeypatch.setenv("GOLINEAR_CACHE", str(home / "cache"))
    sweep = ablation(str(model_folder), "gdn,none", "8+2", train=TRAIN, source=text)
    return list(pin(sweep).cells)


def test_a_cell_from_base_to_scores_and_the_base_again(cells: list[Cell], text: str, home: Path) -> None:
    bench = stages.Bench(source=text)
    base, gdn, exact_only = cells
    before = {name: p.clone() for name, p in bench.base_model(base.base).named_parameters()}
    folder = home / "gdn"
    assert stages.convert(gdn, folder, bench)["new_parameters"] > 0
    said: list[dict[str, object]] = []
    found = stages.train(gdn, folder, bench, on_progress=said.append)
    assert found["training"]["tokens_seen"] == TRAIN.tokens and found["versions"]["torch"] and found["commit"]
    assert found["new_parameters"] == stages.convert(gdn, home / "again", bench)["new_parameters"]
    assert [row["tokens_seen"] for row in said if "tokens_seen" in row] == [64 * i for i in range(1, 7)]
    for name in ("cell.json", "recipe.json", "provenance.json", "new_parameters.safetensors", "curve.jsonl"):
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "cell.json").read_text())["train_key"] == gdn.train_key

    trained = bench.trained(gdn, folder)(torch.arange(40)[None]).logits
    other = stages.Bench().trained(gdn, folder)(torch.arange(40)[None]).logits
    assert torch.equal(trained, other), "another worker reads the same model from the folder"
    stages.convert(exact_only, home / "none", bench)
    stages.train(exact_only, home / "none", bench)
    restored = bench.base_model(base.base)
    assert [n for n, p in restored.named_parameters() if not torch.equal(p, before.pop(n))] == [] and not before
    assert torch.equal(bench.trained(gdn, folder)(torch.arange(40)[None]).logits, trained)


def test_cells_in_one_pass_get_what_they_get_alone(
    model_folder: Path, text: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOLINEAR_CACHE", str(home / "cache"))
    settings = dataclasses.replace(TRAIN, tokens=256, objective="layerwise:128,ce:128")
    cells = pin(ablation(str(model_folder), "gdn,gla", "8+2", train=settings, source=text)).cells[1:]
    together, alone = ([home / how / cell.recipe.mechanism for cell in cells] for how in ("together", "alone"))
    bench = stages.Bench(source=text)
    found = stages.train_together(cells, together, bench, on_progress=lambda row: row["cell"])
    for cell, one, other, result in zip(cells, together, alone, found):
        assert isinstance(result, dict) and result["training"]["cells"] == 2 and (one / "provenance.json").exists()
        stages.train(cell, other, stages.Bench(source=text))
        mine, its = load_file(one / stages.PARAMETERS), load_file(other / stages.PARAMETERS)
        assert all(torch.equal(mine[name], its[name]) for name in mine | its)
    logits = bench.trained(cells[0], together[0])(torch.arange(40)[None]).logits
    assert torch.equal(logits, stages.Bench().trained(cells[0], together[0])(torch.arange(40)[None]).logits)
    with pytest.raises(ValueError, match=r"s2 cannot train with .* s1"):
        stages.train_together([cells[0], dataclasses.replace(cells[1], seed=2)], together, bench)


def test_a_stopped_cell_goes_on_in_another_attempt(cells: list[Cell], text: str, home: Path) -> None:
    gdn = cells[1]
    straight, first, second = home / "0" / "x", home / "1" / "x", home / "2" / "x"
    stages.train(gdn, straight, stages.Bench(source=text))
    said: list[dict[str, object]] = []
    with pytest.raises(Exception, match="told to stop") as stopped:
        stages.train(gdn, first, stages.Bench(source=text), on_progress=said.append, should_stop=lambda: len(said) >= 3)
    assert cause_of(stopped.value) == "preempted"
    (first / "checkpoints" / ".partial-00000009").mkdir()
    assert stages.adopt_checkpoints([first, second], second)
    assert [path.name for path in (second / "checkpoints").iterdir()] == ["step-00000003"]
    found = stages.train(gdn, second, stages.Bench(source=text))
    assert found["training"]["resumed_from"] == 3
    one, other = (load_file(attempt / stages.PARAMETERS) for attempt in (straight, second))
    assert all(torch.equal(one[name], other[name]) for name in one | other), "resumed equals straight, to the bit"
    assert not stages.adopt_checkpoints([home / "nothing"], home / "3")


def test_a_task_that_fails_costs_only_itself(cells: list[Cell], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = home / "data"
    data.mkdir()
    monkeypatch.setenv("GOLINEAR_DATA", str(data))
    (data / "lambada_test.jsonl.gz").write_bytes(b"damaged")
    with gzip.open(data / "heldout_text.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": "Once more unto the breach. " * 200}) + "\n" for _ in range(3))
    stored: dict[str, list[float | None]] = {}
    scores, failed = stages.evaluate(
        cells[0], home / "base", stages.Bench(),
        [TaskSpec(name="lambada_openai", limit=1), TaskSpec(name="perplexity", limit=128, length=64)],
        on_score=lambda task, found: stored.update({task.label: [score.value for score in found]}),
    )  # fmt: skip
    assert list(failed) == ["lambada_openai"] and "lambada_test" in str(failed["lambada_openai"])
    assert list(stored) == ["perplexity@64"] == [score.task.label for score in scores]
    assert scores[0].value is not None and scores[0].value > 1
    assert json.loads((home / "base" / "scores" / "perplexity-64.json").read_text())[0]["value"] == scores[0].value


def test_the_hardest_layers_are_measured_once_and_kept_with_the_cell(cells: list[Cell], text: str, home: Path) -> None:
    recipe = dataclasses.replace(cells[1].recipe, softmax_layers="hardest:0.5")
    cell, folder, bench = dataclasses.replace(cells[1], recipe=recipe), home / "hard", stages.Bench(source=text)
    stages.convert(cell, folder, bench)
    stages.train(cell, folder, bench)
    kept = json.loads((folder / "recipe.json").read_text())["softmax_layers"]
    assert kept in ("list:0", "list:1")
    without_text = stages.Bench(source="local:/nowhere")
    same = without_text.trained(cell, folder)(torch.arange(40)[None]).logits
    assert torch.equal(same, bench.trained(cell, folder)(torch.arange(40)[None]).logits)
    assert without_text.model.recipe.softmax_layers == kept


def test_the_hardest_layers_in_a_training_outside_any_sweep(cells: list[Cell], text: str, home: Path) -> None:
    settings = TrainSettings(tokens=64, sequence_length=16, batch_size=2, warmup_steps=1)
    train_command(cells[1].base, "gdn 8+2 hardest:0.5", home / "alone", settings=settings, data=text)
    trained = {name.split(".")[2] for name in load_file(home / "alone" / "new_parameters.safetensors")}
    assert trained in ({"0"}, {"1"}), "one of the two layers keeps softmax attention and has nothing to train"


def test_what_a_folder_or_a_cell_is_needs_no_weights(cells: list[Cell], text: str, home: Path) -> None:
    cell = dataclasses.replace(cells[1], recipe=Recipe.parse("gdn 8+2 conv hardest:0.5"))
    bench = stages.Bench(source=text)
    stages.convert(cell, home / "cell", bench)
    base = resolve(cell.base)
    export_delta(bench.model, base, "r", home / "delta")
    export(bench.model, None, base, home / "full")
    for name in ("cell", "full", "delta"):
        for weights in (home / name).glob("*.safetensors"):
            weights.unlink()
        shape, recipe = described(str(home / name))
        assert shape == base.shape and recipe == bench.model.recipe and recipe.softmax_layers.startswith("list:"), name
    assert described(cell.base) == (base.shape, None)
    with pytest.raises(ValueError, match="is no model, folder or trained cell"):
        described("gpt-7")


def test_diagnose_writes_tables_and_figures(
    cells: list[Cell], home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GOLINEAR_DATA", str(home))
    with gzip.open(home / "heldout_text.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": "Once more unto the breach. " * 200}) + "\n" for _ in range(3))
    diagnose(cells[0].base, home / "found", tokens="128", length=64, share=0.5, device="cpu")
    assert {f.name for f in (home / "found").iterdir()} >= {"layers.csv", "positions.csv", "by_token.png", "by_layer.png"}
    assert "128 tokens; heldout_text.jsonl.gz" in capsys.readouterr().out
    with pytest.raises(ValueError, match="length must be 2 to 2048"):
        diagnose(cells[0].base, home / "found", tokens="128", length=4096, share=0.5, device="cpu")


def test_the_base_model_is_not_trained(cells: list[Cell], home: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        stages.train(cells[0], home, stages.Bench())
    assert stages.convert(cells[0], home / "base", stages.Bench())["new_parameters"] == 0
    assert dataclasses.replace(cells[1], seed=2).train_key != cells[1].train_key
