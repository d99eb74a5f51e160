"""The benches run, agree with what they promise to print, and write what they print. Speed itself is not tested here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from linear_core.bench import forms, mechanisms
from linear_core.kernels import forced, gated_linear_attention


def test_mechanisms_against_full_attention_and_the_token_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "folder" / "mechanisms.json"
    mechanisms.main(
        ["--device", "cpu", "--lengths", "40", "--repeats", "1", "--mechanisms", "gla,gdn", "--budget", "8+2",
         "--output", str(output)]
    )  # fmt: skip
    stored = json.loads(output.read_text())
    full, gla, gdn = stored["rows"]
    assert [row["mechanism"] for row in (full, gla, gdn)] == ["softmax", "gla", "gdn"]
    assert full["forward_ms"] > 0 and full["backward_ms"] > 0
    for row in (gla, gdn):
        both = row["forward_ms"] + row["backward_ms"]
        assert row["faster_than_loop"] == pytest.approx(row["token_loop_ms"] / both)
        assert row["times_full"] == pytest.approx(both / (full["forward_ms"] + full["backward_ms"]))
    assert stored["versions"]["torch"] == torch.__version__ and stored["threads"] >= 1
    table = capsys.readouterr().out
    assert "times full" in table and "gdn" in table


def test_by_length_reports_ratios_to_full_attention() -> None:
    shape = mechanisms.resolve("smollm2-135m").shape
    recipes = {"gdn": mechanisms.Recipe(mechanism="gdn")}
    rows = list(mechanisms.by_length(shape, recipes, (16, 32), 1, "cpu", torch.float32))
    assert [(row["mechanism"], row["T"]) for row in rows] == [
        ("softmax", 16),
        ("gdn", 16),
        ("softmax", 32),
        ("gdn", 32),
    ]
    full, gdn = rows[2:]
    assert (full["speedup"], full["step_speedup"]) == (1, 1)
    assert gdn["step_speedup"] == pytest.approx(full["step_ms"] / gdn["step_ms"])


def test_a_decode_step_can_be_timed_for_every_mechanism() -> None:
    shape = mechanisms.resolve("smollm2-135m").shape
    for name in (None, *mechanisms.DEFAULT):
        recipe = None if name is None else mechanisms.Recipe(mechanism=name)
        layer = mechanisms.Layer(shape, recipe, "cpu", torch.float32)
        assert layer.prepare_step(100)().shape == (1, 1, shape.hidden)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="mechanism 'gdm' is not known; allowed: none, hedgehog"):
        mechanisms.run(mechanisms=("gdm",))
    with pytest.raises(ValueError, match="budget '8' is not of the form"):
        mechanisms.run(budget="8")


def test_the_table_of_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "forms.json"
    options = ["--device", "cpu", "--tiny", "--output", str(output)]
    assert forms.main(options) == 0
    rows = json.loads(output.read_text())["rows"]
    assert {row["rule"] for row in rows} == set(forms.RULES) and {row["form"] for row in rows} == {"chunked", "step"}
    assert all(row["out"] <= 1e-2 and row["verdict"] == "ok" for row in rows)
    monkeypatch.setattr(forms, "tolerance", lambda *_: 1e-9)
    assert forms.main(options) == 1
    assert all("T=" in row["reason"] and row["verdict"] == "NOT OK" for row in json.loads(output.read_text())["rows"])


def test_forced_takes_a_form_and_gives_it_back() -> None:
    q = torch.randn(1, 5, 2, 8)
    with forced("step"), pytest.raises(ValueError, match="takes one token, not 5"):
        gated_linear_attention(q, q, q, None)
    gated_linear_attention(q, q, q, None)
