"""Perplexity and agreement: against the definitions, and with the base run once."""

import copy
import gzip
import json
import math

import pytest
import torch

from linear_core.convert import convert, new_parameters, unconvert
from linear_core.evaluate import windows as w
from linear_core.evaluate.attribution import attribute
from linear_core.evaluate.run import evaluate_task
from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import Recipe

PERPLEXITY = TaskSpec(name="perplexity", limit=96, length=32)
AGREEMENT = TaskSpec(name="agreement", limit=96, length=32)


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    rows = [{"id": f"doc{i}", "text": " ".join(f"word{(i * j) % 17}" for j in range(60))} for i in range(1, 4)]
    with gzip.open(tmp_path / "heldout_text.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    monkeypatch.setenv("GOLINEAR_DATA", str(tmp_path))
    monkeypatch.setenv("GOLINEAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def converted(tiny):
    model = convert(copy.deepcopy(tiny), Recipe.parse("gdn 4+2"))
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def test_perplexity_is_its_definition(tiny, tokenizer):
    windows = w.heldout_windows(PERPLEXITY, tokenizer)
    assert windows.tokens.shape == (3, 32)
    with torch.no_grad():
        log_probs = tiny(windows.tokens).logits[:, :-1].log_softmax(-1)
    losses = -log_probs.gather(2, windows.tokens[:, 1:, None])[..., 0]
    (score,) = evaluate_task(tiny, tokenizer, PERPLEXITY)
    assert score.value == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    assert score.stderr == pytest.approx(score.value * float(losses.mean(1).std()) / math.sqrt(3), rel=1e-4)
    assert score.samples == 3 * 31


def test_agreement_is_its_definition_and_needs_no_second_model(tiny, converted, tokenizer):
    windows = w.heldout_windows(AGREEMENT, tokenizer)
    with torch.no_grad():
        ours, base = (m(windows.tokens).logits.log_softmax(-1) for m in (converted, tiny))
    kl = torch.nn.functional.kl_div(ours, base, log_target=True, reduction="none").sum(-1).mean()
    same = (ours.argmax(-1) == base.argmax(-1)).float().mean()
    top1, divergence = evaluate_task(converted, tokenizer, AGREEMENT)
    assert top1.value == pytest.approx(float(same)) and divergence.value == pytest.approx(float(kl), rel=1e-4)
    assert divergence.value > 0


def test_a_base_agrees_with_itself_and_its_conversion_reads_the_same_file(tiny, converted, tokenizer, tmp_path):
    top1, kl = evaluate_task(tiny, tokenizer, AGREEMENT)
    assert (top1.value, kl.value, top1.flags) == (1.0, 0.0, ())
    (file,) = (tmp_path / "cache" / "references").iterdir()
    before = file.stat().st_mtime_ns
    first = evaluate_task(converted, tokenizer, AGREEMENT)
    again = evaluate_task(converted, tokenizer, AGREEMENT, base_model_or_reference=tmp_path / "elsewhere")
    assert file.stat().st_mtime_ns == before
    assert [s.value for s in first] == [s.value for s in again], "the base run inside the converted model is the base"


def test_another_model_is_not_taken_for_the_base(converted, tiny_qwen, tokenizer):
    with pytest.raises(ValueError, match="not the one this model was converted from"):
        evaluate_task(converted, tokenizer, AGREEMENT, base_model_or_reference=tiny_qwen)


def test_a_change_of_weights_is_seen(converted, tokenizer):
    first = evaluate_task(converted, tokenizer, PERPLEXITY)[0].value
    with torch.no_grad():
        for parameter in new_parameters(converted).values():
            parameter.mul_(1.5)
    assert evaluate_task(converted, tokenizer, PERPLEXITY)[0].value != first


def test_the_exact_path_alone_is_another_score(converted, tokenizer):
    hybrid, exact = (evaluate_task(converted, tokenizer, PERPLEXITY, switches=s)[0] for s in (None, {"paths": "exact"}))
    assert hybrid.value != exact.value
    with pytest.raises(ValueError, match="need a linearized model"):
        evaluate_task(unconvert(copy.deepcopy(converted)), tokenizer, PERPLEXITY, switches={"paths": "exact"})


def test_text_that_is_too_short_is_refused(tiny, tokenizer):
    with pytest.raises(ValueError, match="a shorter length"):
        evaluate_task(tiny, tokenizer, TaskSpec(name="perplexity", length=100_000))


def test_attribution_says_what_the_state_saves(tiny, converted, tokenizer):
    task = TaskSpec(name="attribution", limit=96, length=32)
    saved, exact, linear, frozen = evaluate_task(converted, tokenizer, task)
    (hybrid,) = evaluate_task(converted, tokenizer, PERPLEXITY)
    assert saved.value == pytest.approx(math.log(exact.value) - math.log(hybrid.value), abs=1e-5)
    assert linear.value != exact.value and math.isfinite(frozen.value)
    windows = w.heldout_windows(task, tokenizer)
    behind = w.token_losses(converted, windows, {"state_frozen_from": 16})[:, 15:]
    assert frozen.value == pytest.approx(math.exp(behind.mean()), rel=1e-5)
    assert torch.equal(
        w.token_losses(converted, windows, {"state_frozen_from": 16})[:, :15],
        w.token_losses(converted, windows)[:, :15],
    )
    assert all("one path" in s.reason for s in evaluate_task(tiny, tokenizer, task))


def test_any_task_can_be_attributed(converted, tokenizer):
    scores = {s.metric: s for s in attribute(converted, tokenizer, PERPLEXITY, frozen_from=8)}
    assert list(scores) == [f"perplexity.{p}" for p in ("hybrid", "exact", "linear", "frozen", "state")]
    assert scores["perplexity.state"].value == pytest.approx(
        math.log(scores["perplexity.hybrid"].value) - math.log(scores["perplexity.exact"].value), abs=1e-5
    )


def test_a_conversion_without_new_parameters_is_not_taken_for_its_base():
    """`none` adds no parameter and works in place: what was kept of the base must not become its score."""
    from linear_core.convert import convert
    from linear_core.evaluate.windows import Windows, hidden_states
    from linear_core.recipe import Recipe
    from tests.core.tiny import base, tokens

    model, windows = base(), Windows(tokens(40), ("one",))
    before = hidden_states(model, windows)
    after = hidden_states(convert(model, Recipe.parse("none 5+0")), windows)
    assert not after.equal(before)
