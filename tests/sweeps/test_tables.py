"""Tables: nothing missing is averaged, nothing different is merged, nothing is shown that cannot be compared."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_helpers import finish, pinned, score

from linear_core.evaluate.scores import TaskSpec
from linear_core.settings import TrainSettings
from sweeps import published, render, tables
from sweeps.grids import ablation, join
from sweeps.store import Store, new_holder
from sweeps.sweep import Sweep
from sweeps.tables import Entry, Table
from sweeps.views import VIEWS, view

SWEEP = pinned(
    ablation("smollm2-135m", "gdn,gla", "56+8", "none", "1,2,3", tasks="mmlu,lambada_openai"),
    reasons={"lambada_openai": "no data here; set GOLINEAR_DATA"},
)


def entry(table: Table, recipe: str, task: str, base: str = "smollm2-135m") -> Entry | None:
    rows = [row for row in table.rows if (row.base, row.recipe) == (base, recipe)]
    columns = [column for column in table.columns if column.title == task]
    assert len(rows) == len(columns) == 1, [row.recipe for row in table.rows]
    return rows[0].entries.get(columns[0])


def filled(store: Store, sweep: Sweep = SWEEP) -> Table:
    for cell, value in zip(sweep.cells, (0.40, 0.35, 0.37, None, 0.30, 0.31, 0.32)):
        finish(store, sweep, cell, {"mmlu": value})
    return tables.summary(tables.frame(store, sweep), title="the table")


def test_mean_spread_gap_and_what_is_missing(store: Store) -> None:
    table = filled(store)
    base, gdn, gla = (entry(table, recipe, "mmlu") for recipe in ("base", "gdn 56+8", "gla 56+8"))
    assert base and gdn and gla
    assert (base.value, base.gap) == (40.0, None)
    assert gdn.value == pytest.approx(36.0) and gdn.num_seeds == 2
    assert gdn.partial and gdn.note == "its data is not here"
    assert gdn.spread == pytest.approx(2**0.5) and gdn.gap == pytest.approx(-4.0) and gdn.kept == pytest.approx(90.0)
    assert gla.value == pytest.approx(31.0) and gla.spread == pytest.approx(1.0) and not gla.partial
    lambada = entry(table, "gdn 56+8", "lambada_openai")
    assert lambada and lambada.value is None and lambada.note.startswith("no data here")
    row = table.rows[1]
    assert row.facts["new_parameters"] == 726030 and row.facts["minutes"] == 1.0 and row.facts["seeds"] == 3


def test_cells_that_shared_a_card_have_a_table(store: Store) -> None:
    """Half a GPU is no whole number."""
    rows = [{**row, "gpus": 0.5} for row in tables.records(tables.frame(store, SWEEP))]
    assert {row["gpus"] for row in tables.records(tables.from_records(rows))} == {0.5}


def test_a_failed_cell_and_a_task_not_asked_for(store: Store) -> None:
    claim = store.claim(SWEEP.cells[1].train_key, new_holder())
    assert claim
    store.fail(claim, "nonfinite", "loss is nan at step 3")
    other = pinned(ablation("smollm2-135m", "none", tasks="piqa"))
    both = tables.concat([tables.frame(store, SWEEP), tables.frame(store, other)])
    table = tables.summary(both)
    failed = entry(table, "gdn 56+8", "mmlu")
    assert failed and failed.note == "nonfinite: loss is nan at step 3; not measured yet"
    assert entry(table, "none 56+8", "mmlu") is None, "not asked for: no dash"
    text = render.render(table)
    assert "| none 56+8 |  |  | –" in text and "¹ " in text


def test_nothing_converted_is_shown_without_its_base(store: Store) -> None:
    finish(store, SWEEP, SWEEP.cells[1], {"mmlu": 0.5})
    shown = entry(tables.summary(tables.frame(store, SWEEP)), "gdn 56+8", "mmlu")
    assert shown and shown.value is None and "not shown until its base model is" in shown.note


def test_attribution_is_shown_without_a_gap_and_asked_only_where_there_is_a_state(store: Store) -> None:
    sweep = pinned(ablation("smollm2-135m", "gdn,none", tasks="agreement,attribution"))
    found = {"agreement": [("top1", 0.9), ("kl", 0.3)], "attribution": [("state_nats", 0.2), ("exact", 50.0)]}
    for cell in sweep.cells:
        taken = store.claim(cell.train_key, new_holder())
        assert taken
        for task, key in sweep.score_keys(cell):
            store.put_scores(taken, key, [score(task, value, metric) for metric, value in found[task.name]])
        store.finish(taken)
    table = tables.summary(tables.frame(store, sweep))
    assert [column.title for column in table.columns] == ["agreement top1", "attribution state_nats"]
    gdn = entry(table, "gdn 56+8", "attribution state_nats")
    assert gdn and (gdn.value, gdn.gap) == (0.2, None)
    assert entry(table, "base", "attribution state_nats") is None is entry(table, "none 56+8", "attribution state_nats")
    every = tables.summary(tables.frame(store, sweep), all_metrics=True)
    arrows = {column.title: column.higher_is_better for column in every.columns}
    assert arrows == {"agreement top1": True, "agreement kl": False, "attribution state_nats": True, "attribution exact": False}


def test_settings_sources_and_limits_are_never_merged(store: Store) -> None:
    faster = pinned(ablation("smollm2-135m", "gdn", tasks="mmlu", train=TrainSettings(learning_rate=1e-2)))
    limited = pinned(ablation("smollm2-135m", "gdn", tasks="mmlu:10"))
    elsewhere = dataclasses.replace(limited, task_sources=(dataclasses.replace(limited.task_sources[0], source="hub"),))
    for value, sweep in enumerate((faster, limited, elsewhere)):
        for cell in sweep.cells:
            finish(store, sweep, cell, {"mmlu": 0.5 + value / 10})
    filled(store)
    table = tables.summary(tables.concat(tables.frame(store, s) for s in (SWEEP, faster, limited, elsewhere)))
    assert [row.recipe for row in table.rows] == [
        "base", "gdn 56+8 learning_rate=0.002", "gla 56+8", "gdn 56+8 learning_rate=0.01"]  # fmt: skip
    titles = [column.title for column in table.columns]
    assert len(set(titles)) == 4 and "mmlu acc limit 10 seed 0 hub" in titles
    again = tables.concat([tables.frame(store, SWEEP)] * 3)
    assert len(again) == len(tables.frame(store, SWEEP)), "a score that is in two sweeps counts once"


values = st.lists(st.none() | st.floats(0, 1, allow_nan=False), min_size=7, max_size=7)


@given(values, st.randoms(use_true_random=False))
def test_means_are_of_seeds_with_a_value_whatever_the_order(found: list[float | None], rng: random.Random) -> None:
    """On the frame alone: rows in any order give the same table, entry by entry."""
    rows = []
    for cell, value in zip(SWEEP.cells, found):
        own = score(TaskSpec(name="mmlu"), value)
        source = SWEEP.task_sources[0]
        rows.append(tables._axes(cell) | tables._provenance({}) | tables._score_row(own.task, source, "acc", own, ""))
    data = tables.from_records(rows)
    rng.shuffle(rows)
    shuffled = tables.summary(tables.from_records(rows))
    for recipe, part in (("gdn 56+8", found[1:4]), ("gla 56+8", found[4:7])):
        shown = entry(tables.summary(data), recipe, "mmlu")
        there = [value for value in part if value is not None]
        assert shown and shown == entry(shuffled, recipe, "mmlu")
        if found[0] is None or not there:
            assert shown.value is None and shown.note
        else:
            assert shown.value == pytest.approx(100 * sum(there) / len(there)) and shown.num_seeds == len(there)
            assert shown.partial == (len(there) < 3)


def test_the_published_number_stands_only_beside_the_same_thing(store: Store) -> None:
    sweep = pinned(join(
        "both", ablation("llama3.1-8b", "gdn", "56+8,64+0", "none,conv", tasks="mmlu,niah_single_1@4096"),
        ablation("llama3.1-8b", "gdn", merges="mass"), ablation("llama3.1-8b", "gdn", recipe={"gate_bias": 3.0}),
        ablation("llama3.1-8b", "gdn", "120+8", "conv"), ablation("llama3.1-8b", "gla", train=TrainSettings(tokens=9)),
    ))  # fmt: skip
    table = tables.summary(tables.frame(store, sweep))
    facts = {row.recipe: [e.published for e in row.entries.values()] for row in table.rows}
    assert facts == {
        "base": [65.25, None], "gdn 56+8": [58.88, None], "gdn 56+8 conv": [59.17, None], "gdn 64+0": [51.57, None],
        "gdn 64+0 conv": [None, None], "gdn 56+8 mass": [None, None], "gdn 56+8 gate-bias 3": [None, None],
        "gla 56+8": [None, None],
        "gdn 120+8 conv": [published_value("120", "mmlu_5shot"), published_value("120", "ruler_niah_single_1_4096")],
    }  # fmt: skip
    limited = tables.summary(tables.frame(store, pinned(ablation("llama3.1-8b", "gdn", tasks="mmlu:100"))))
    assert [e.published for row in limited.rows for e in row.entries.values()] == [None, None]
    assert len(published.rows()) == 556


def published_value(window: str, task: str) -> float:
    wanted = ("gdn", window, task)
    return next(float(r["mean"]) for r in published.rows() if (r["mechanism"], r["window"], r["task"]) == wanted)


def test_best_is_marked_only_when_it_is_sure(store: Store) -> None:
    sweep = pinned(ablation("smollm2-135m", "gdn,gla,kgla", "56+8", "none", "1,2,3", tasks="mmlu"))
    values = (0.9, 0.50, 0.51, 0.52, 0.30, 0.31, 0.32, 0.30, 0.31, 0.33)
    for cell, value in zip(sweep.cells, values):
        finish(store, sweep, cell, {"mmlu": value})
    table = tables.summary(tables.frame(store, sweep))
    assert [row.recipe for row in table.rows for e in row.entries.values() if e.best] == ["gdn 56+8"]
    assert "**51.00 ± 1.00 (−39.00)**" in render.render(table)


class Cells(HTMLParser):
    """Counts rows and cells, and fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "wbr":
            return
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_format_holds_the_whole_table_and_the_store_rebuilds_it(store: Store) -> None:
    table = filled(store)
    data = tables.frame(store, SWEEP)
    texts = {name: tables.render(data, name, title="the table") for name in render.FORMATS}
    for name in render.FORMATS:
        assert name == "csv" or ("36.00" in texts[name].replace("36.0,", "36.00,")), name
        assert texts[name] == tables.render(tables.frame(store, SWEEP), name, title="the table"), "rebuilt, identical"
    assert len(list(csv.DictReader(io.StringIO(texts["csv"])))) == len(data) == 14
    parser = Cells()
    parser.feed(texts["html"])
    assert not parser.open and parser.seen.count("tr") == 4 and parser.seen.count("th") == 9
    shown = json.loads(texts["json"])
    assert shown["rows"][1]["scores"]["mmlu"]["kept"] == pytest.approx(90.0)
    assert shown["rows"][1]["scores"]["lambada_openai"]["value"] is None
    assert texts["latex"].count(r"\\") == 4 and r"lambada\_openai" in texts["latex"]
    assert render.rich_table(view(table)).row_count == 3
    with pytest.raises(ValueError, match="allowed: markdown, csv"):
        tables.render(data, "xls")


def test_views_show_one_side_each_in_every_format(store: Store) -> None:
    table = filled(store)
    rows = {name: {row[1]: row[2:] for row in view(table, name).body} for name in VIEWS}
    assert rows["gaps"]["gdn 56+8"][0].startswith("−4.00 (−10.0 %)") and rows["gaps"]["base"][0] == ""
    assert rows["kept"]["gdn 56+8"][0].startswith("90.0 %") and rows["kept"]["gdn 56+8"][-1] == "–"
    assert rows["seeds"]["gdn 56+8 seed 2"] == ("37.00", "–¹") and rows["seeds"]["gdn 56+8 seed 3"] == ("–²", "–¹")
    assert view(table, "seeds").notes == ("¹ no data here; set GOLINEAR_DATA", "² its data is not here")
    assert rows["cost"]["gdn 56+8"] == ("3", "0.73M", "5.8 MiB", "10,240,000", "1.0")
    assert rows["summary"]["gdn 56+8"] == rows["scores"]["gdn 56+8"] + rows["cost"]["gdn 56+8"]
    for name in VIEWS:
        for kind in render.FORMATS:
            assert render.render(table, kind, show=name).endswith("\n") or kind == "json"
    with pytest.raises(ValueError, match="allowed: summary, scores, gaps"):
        render.render(table, show="best")


def test_the_wins_view_counts_tasks_at_or_above_the_base_within_a_tolerance(store: Store) -> None:
    sweep = pinned(ablation("smollm2-135m", "gdn,gla", tasks="mmlu,piqa,arc_easy,winogrande,agreement"))
    points = ({"mmlu": 0.40, "piqa": 0.60, "arc_easy": 0.50, "winogrande": 0.55, "agreement": 1.0},
              {"mmlu": 0.40, "piqa": 0.595, "arc_easy": 0.47, "winogrande": 0.35, "agreement": 0.8}, {"mmlu": 0.41})  # fmt: skip
    for cell, values in zip(sweep.cells, points):
        finish(store, sweep, cell, values)
    shown = view(tables.summary(tables.frame(store, sweep)), "wins")
    assert shown.header[2:] == ("tasks", "≥ base − 0", "≥ base − 1", "≥ base − 5", "half of them at α")
    assert {row[1]: row[2:] for row in shown.body} == {
        "gdn 56+8": ("4 of 4", "25 %", "50 %", "75 %", "0.50"), "gla 56+8": ("1 of 4", "100 %", "100 %", "100 %", "0.00")}  # fmt: skip


def test_the_published_view_has_ours_the_papers_and_the_peers(store: Store) -> None:
    sweep = pinned(ablation("llama3.1-8b", "gdn", "120+8", "conv", tasks="mmlu,piqa:50"))
    for cell, value in zip(sweep.cells, (0.66, 0.60)):
        finish(store, sweep, cell, {"mmlu": value})
    shown = view(tables.summary(tables.frame(store, sweep)), "published")
    assert shown.header == ("model", "recipe", "mmlu ↑")
    facts = {recipe: text for _, recipe, text in shown.body}
    paper = float(published_value("120", "mmlu_5shot"))
    assert facts["gdn 120+8 conv"] == f"60.00 / {paper:.2f} ({60 - paper:+.2f})".replace("-", "−")
    assert facts["base"] == "66.00 / 65.25 (+0.75)" and facts["lolcats, cache 64 (published)"] == "54.88"


CHANGES = st.sampled_from(
    [("recipe", {name: value}) for name, value in {
        "mechanism": "gla", "window": 57, "sinks": 4, "adaptation": "conv", "merge": "mass", "softmax_layers": "list:0",
        "gate_bias": 1.5, "learned_read_scale": True}.items()]
    + [("train", {name: value}) for name, value in {
        "tokens": 4097, "sequence_length": 64, "batch_size": 2, "learning_rate": 1.0000001e-3, "warmup_steps": 1,
        "objective": "kl", "weight_decay": 0.1, "clip_norm": 2.0, "beta1": 0.8, "beta2": 0.99, "final_learning_rate": 0.1,
        "isolate_documents": True}.items()]
    + [("", {"revision": "rev2"}), ("", {"data": "text2"})]
)  # fmt: skip


@given(CHANGES, st.floats(0, 1), st.floats(0, 1))
def test_rows_that_differ_in_any_setting_are_never_merged(change: tuple[str, dict], a: float, b: float) -> None:
    """One changed field of recipe, training, weights or text: two rows, each with its own value, and names that differ."""
    where, fields = change
    base, cell = pinned(ablation("smollm2-135m", "gdn", tasks="mmlu", train=TrainSettings(tokens=4096))).cells
    other = dataclasses.replace(cell, **({where: dataclasses.replace(getattr(cell, where), **fields)} if where else fields))
    rows = []
    for each, value in ((base, 1.0), (other.base_of(), 1.0), (cell, a), (other, b)):
        own = score(TaskSpec(name="mmlu"), value)
        row = tables._axes(each) | tables._provenance({}) | tables._score_row(own.task, SWEEP.task_sources[0], "acc", own, "")
        rows += [row] if row not in rows else []
    made = tables.summary(tables.from_records(rows))
    converted = [row for row in made.rows if not row.is_base]
    assert len(converted) == 2 and len({row.recipe for row in converted}) == 2
    found = sorted(entry.value for row in converted for entry in row.entries.values())
    assert found == pytest.approx(sorted([100 * a, 100 * b]))
    assert all(entry.num_seeds == 1 for row in converted for entry in row.entries.values())


def test_two_base_models_of_one_name_are_kept_apart_and_no_path_is_shown(store: Store, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    frames = []
    for place, revision, values in (("here", "rev1", (0.4, 0.3)), ("there", "rev2", (0.8, 0.3))):
        folder = tmp_path / place / "tiny"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        sweep = pinned(ablation(str(folder), "gdn", tasks="mmlu"))
        sweep = dataclasses.replace(
            sweep, cells=tuple(dataclasses.replace(cell, revision=revision) for cell in sweep.cells)
        )
        for cell, value in zip(sweep.cells, values):
            finish(store, sweep, cell, {"mmlu": value})
        frames.append(tables.frame(store, sweep))
    table = tables.summary(tables.concat(frames))
    assert [(row.base, row.recipe, *(e.gap for e in row.entries.values())) for row in table.rows] == [
        ("tiny", "base revision=rev1", None), ("tiny", "gdn 56+8 revision=rev1", pytest.approx(-10.0)),
        ("tiny", "base revision=rev2", None), ("tiny", "gdn 56+8 revision=rev2", pytest.approx(-50.0)),
    ]  # fmt: skip
    assert str(tmp_path) not in "".join(render.render(table, name) for name in render.FORMATS)


def test_an_empty_sweep_is_an_empty_table(store: Store) -> None:
    nothing = tables.summary(tables.frame(store, Sweep(name="none", cells=())))
    assert nothing.rows == () and all(render.render(nothing, name) is not None for name in render.FORMATS)
