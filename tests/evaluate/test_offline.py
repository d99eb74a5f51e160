"""Where data comes from, and what is said when it cannot be had."""

import gzip
import json
import time

import pytest

from linear_core.evaluate import offline
from linear_core.evaluate.run import data_source, evaluate_task
from linear_core.evaluate.scores import TaskSpec

LAMBADA = TaskSpec(name="lambada_openai", limit=2)


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "empty"))
    offline.hub_reachable.cache_clear()
    yield
    offline.hub_reachable.cache_clear()


def write(folder, name, rows):
    with gzip.open(folder / name, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_without_data_and_hub_the_score_is_missing_and_says_how_to_get_it(no_hub, monkeypatch, tiny, tokenizer):
    monkeypatch.delenv("GOLINEAR_DATA", raising=False)
    scores = evaluate_task(tiny, tokenizer, LAMBADA)
    assert [s.metric for s in scores] == ["acc", "perplexity"]
    assert all(s.value is None and "GOLINEAR_DATA" in s.reason and "lambada_test.jsonl.gz" in s.reason for s in scores)


def test_a_silent_hub_costs_seconds_once(monkeypatch):
    """An address that answers nothing: one wait, then remembered."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://192.0.2.1:9")
    monkeypatch.setattr(offline, "PROBE_SECONDS", 0.5)
    offline.hub_reachable.cache_clear()
    started = time.monotonic()
    assert not offline.hub_reachable() and not offline.hub_reachable()
    assert time.monotonic() - started < 3
    offline.hub_reachable.cache_clear()


def test_sources_name_the_file_and_its_digest(no_hub, monkeypatch, tmp_path):
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path))
    assert not data_source(LAMBADA)[1]
    write(tmp_path, "lambada_test.jsonl.gz", [{"text": "a b c"}])
    source, available, reason = data_source(LAMBADA)
    assert available and not reason
    assert source.startswith("lambada_test.jsonl.gz sha256:") and len(source.rpartition(":")[2]) == 16
    write(tmp_path, "lambada_test.jsonl.gz", [{"text": "a b c d"}])
    assert data_source(LAMBADA)[0] != source


def test_unreadable_data_is_refused(monkeypatch, tmp_path, tiny, tokenizer):
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="not a readable folder"):
        data_source(LAMBADA)
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path))
    (tmp_path / "heldout_text.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ValueError, match="heldout_text"):
        evaluate_task(tiny, tokenizer, TaskSpec(name="perplexity", limit=64))
