"""The report: words that follow from the numbers, one file that needs nothing else, figures that say what they lack."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sweep_helpers import finish, pinned, score
from test_study import PROVENANCE, SWEEP, filled
from test_tables import Cells

from linear_core import style
from sweeps import figures, findings, report, study
from sweeps.grids import ablation
from sweeps.store import Store, new_holder
from sweeps.sweep import Sweep


@pytest.fixture
def made(store: Store) -> study.Study:
    filled(store)
    return study.of_sweep(store, SWEEP, "ablation-1")


def test_words_follow_from_the_numbers(made: study.Study, store: Store) -> None:
    table = made.table()
    (verdict,) = findings.verdicts(table)
    assert verdict.best.recipe == "gdn 56+8" and verdict.is_clear and verdict.lead is not None
    said = findings.sentence(verdict)
    assert said.startswith("**gdn 56+8** is best at 70.25 %, ahead of gla 56+8 by 20.25 points (")
    assert "p < 0.001, significant); worse than the base model by 4.75 points (" in said
    (headline,) = findings.headline(table)
    assert "has the best score on 1 of 1 measure, on 1 of them significantly ahead" in headline
    assert "It keeps 93.7 % of the base model's scores on average and needs 5.8 MiB" in headline
    (effect,) = findings.effects(table)
    assert (effect.axis, effect.first, effect.second, effect.pairs) == ("mechanism", "gdn", "gla", 1)
    column = table.columns[0]
    assert effect.means[column] == pytest.approx(-20.25) and effect.worse[column] == 1 and effect.better[column] == 0
    assert any("partial" in text for text in findings.cautions(table))
    alone = pinned(ablation("smollm2-135m", "gdn", tasks="mmlu"))
    assert findings.headline(study.of_sweep(store, alone).table()) == ["**smollm2-135m**: no setting has a score yet."]
    for cell, value in zip(alone.cells, (0.5, 0.5)):
        finish(store, alone, cell, {"mmlu": value})
    (equal,) = findings.verdicts(study.of_sweep(store, alone).table())
    assert "reaches 50.00 %; level with the base model (" in findings.sentence(equal)


def test_one_file_that_needs_nothing_else_and_is_the_same_again(made: study.Study, tmp_path: Path) -> None:
    page = report.write(made, tmp_path / "one")
    text = page.read_text()
    again = report.write(study.read([tmp_path / "one" / "study.json"]), tmp_path / "two")
    assert again.read_text() == text, "rebuilt from the exported file, byte for byte"
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|<script|@import|url\((?!#)', text), "nothing from elsewhere"
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)) and all(
        name in ids for pair in re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text) for name in pair if name
    )
    for wanted in ("ahead of gla 56+8", "NVIDIA H200", "commit abc", "torch 2.11.0", "loss is nan at step 3", "no text here",
                   "<svg", "GPU-minutes"):  # fmt: skip
        assert wanted in text, wanted
    parser = Cells()
    parser.feed(re.sub(r"<(?:meta|!DOCTYPE|path|use|rect|image)[^>]*>|</(?:path|use|rect)>|<\?.*?\?>", "", text))
    assert not parser.open
    assert str(tmp_path) not in text
    assert report.markdown(made).startswith("# ablation\n")


def test_a_report_of_nothing_is_a_page_that_says_so(store: Store) -> None:
    for sweep in (Sweep(name="none", cells=()), pinned(ablation("smollm2-135m", "gdn", tasks="")), SWEEP):
        assert "<h2>Scores</h2>" in report.html(study.of_sweep(store, sweep)), sweep.name


def test_every_figure_is_drawn_or_says_why_not(made: study.Study, tmp_path: Path) -> None:
    files, lacking = figures.write(made, tmp_path)
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in ("scores-smollm2-135m", "cost", "training") for kind in ("svg", "png")
    }
    assert {d.name: d.lacks[0] for d in lacking} == {
        "size": "needs at least two base models of different size; this study has one",
        "budget": "needs cells with at least two budgets; this study has one",
        "attribution": "no attribution was measured: add the task attribution",
        "lengths": "no task was asked at two lengths: e.g. niah_single_1@1024,niah_single_1@2048",
        "latency": "speed was not measured at two lengths: e.g. latency@2048,latency@8192",
        "errors": "no layer errors were measured: add the task diagnostics",
    }
    first = {file.name: file.read_bytes() for file in files}
    assert first == {file.name: file.read_bytes() for file in figures.write(made, tmp_path)[0]}, "the same bytes again"
    with style.drawing():
        (drawing,) = figures.scores(made.table(), made.table().rows[0])
    assert drawing.lacks == ("gla 56+8, lambada_openai is partial (nonfinite: loss is nan at step 3)",)


def test_all_figures_of_a_study_that_has_everything(store: Store) -> None:
    """Two base models, two budgets, every kind of task; one score is missing and each figure that lacks it says so."""
    tasks = "perplexity,lambada_openai,niah_single_1@1024,niah_single_1@2048,attribution,diagnostics,latency@64,latency@128"
    sweep = pinned(ablation("smollm2-135m,qwen3-0.6b-base", "gdn", "0+0,56+8", tasks=tasks))
    kinds = {"latency": ("tokens_per_s", "prefill_tokens_per_s", "cache_mib"), "attribution": ("state_nats", "exact", "linear", "frozen"),
             "diagnostics": ("nmse",), "perplexity": ("perplexity",)}  # fmt: skip
    errors = {"layers": [0, 1], "positions": [[1, 2], [2, 4], [4, 9]], "nmse": [[0.0, 0.5, 1.0], [0.1, 0.2, 2.0]]}
    for number, cell in enumerate(sweep.cells, start=1):
        claim = store.claim(cell.train_key, new_holder())
        assert claim
        if not cell.is_base:
            (store.folder(claim) / "curve.jsonl").write_text('{"tokens_seen": 64, "loss": 3.0}\n{"tokens_seen": 128, "loss": 2.5}\n')
            store.publish(claim, cell, PROVENANCE)
        for task, key in sweep.score_keys(cell):
            absent = task.label == "niah_single_1@2048" and number == len(sweep.cells)
            scores = [score(task, None if absent else 0.1 * number, metric) for metric in kinds.get(task.name, ("acc",))]
            details = {"map": errors} if task.name == "diagnostics" else {}
            store.put_scores(claim, key, [type(s)(**{**vars(s), "details": details}) for s in scores])
        store.finish(claim)
    found = study.from_json(study.to_json(study.of_sweep(store, sweep)))
    with style.drawing():
        drawings = {drawing.name: drawing for drawing in figures.draw(found)}
    assert [name for name, drawing in drawings.items() if drawing.figure is None] == []
    lack = "gdn 56+8, niah_single_1@2048 is missing (its data is not here)"
    assert {name for name, d in drawings.items() if lack in d.lacks} >= {"scores-qwen3-0-6b-base-2", "budget", "lengths"}
    assert "qwen3-0.6b-base gdn 56+8 lacks a score" in drawings["cost"].lacks


def test_the_example_of_the_docs_says_what_its_results_say() -> None:
    """Every sentence and every score of the committed page follows from the study.json beside it."""
    folder = Path(__file__).parents[2] / "docs" / "example-report"
    page, found = (folder / "index.html").read_text(), study.read([folder / "study.json"])
    wanted = report.html(found)
    rebuild = "golinear report --from docs/example-report/study.json -o docs/example-report"
    for part in (r'<div class="headline">.*?</div>', r'<dl class="verdicts">.*?</dl>', r'<section id="scores">.*?</section>'):
        there, asked = (re.search(part, text, re.DOTALL) for text in (page, wanted))
        assert there and asked and there[0] == asked[0], rebuild
