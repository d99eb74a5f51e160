"""The prefix-sharing lm-eval model: item by item what HFLM answers, whatever the batches."""

import copy
from dataclasses import replace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from linear_core.convert import convert, new_parameters
from linear_core.evaluate.harness import PrefixLM, TruncationError
from linear_core.recipe import Recipe

SHOTS = "Question: is two even?\nAnswer: yes\n\nQuestion: is three even?\nAnswer: no\n\n"
STORY = "Once upon a time there was a house with a garden, and in the garden lived a dog that knew two names:"
PAIRS = [
    *((f"{SHOTS}Question: {q}?\nAnswer:", c) for q in ("is nine odd", "is a cat a dog", "why") for c in (" yes", " no", " yes no")),
    ("An unrelated and rather longer context, which shares nothing with the others", " at all"),
    *((f"{STORY} {a} and", f" {b}.") for a in ("Ann", "the other dog") for b in ("Bob", "so on", "on")),
    ("trailing spaces  ", "stay with the continuation"),
    ("", "a text without a context"),
    (SHOTS, "Question"),
    (SHOTS, "Question: is nine odd?"),
    ("An unrelated and rather longer context, which shares nothing with the others", " at all"),
]  # fmt: skip


def asked(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


RECIPES = {
    "gdn": Recipe.parse("gdn 8+2"),
    "gla, pure": Recipe.parse("gla 0+0 conv"),
    "some softmax layers": replace(Recipe.parse("gdn 8+2 mass"), softmax_layers="list:1"),
}


@pytest.fixture(scope="module", params=["plain", "qwen3", *RECIPES])
def model(request, tiny, tiny_qwen):
    """Plain models, and linearized ones whose new parameters are far from their start."""
    if request.param in RECIPES:
        converted = convert(copy.deepcopy(tiny), RECIPES[request.param])
        with torch.no_grad():
            for parameter in new_parameters(converted).values():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
        return converted
    return {"plain": tiny, "qwen3": tiny_qwen}[request.param]


@pytest.mark.parametrize(("batch_size", "min_saving"), [(1, 1), (3, 16), ("auto", 64), ("auto", 10**9)])
def test_log_likelihoods_are_those_of_hflm(model, tokenizer, batch_size, min_saving):
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4).loglikelihood(
        asked("loglikelihood", PAIRS), disable_tqdm=True
    )
    lm = PrefixLM(model, tokenizer, batch_size=batch_size, min_saving=min_saving)
    ours = lm.loglikelihood(asked("loglikelihood", PAIRS))
    assert [b for _, b in ours] == [b for _, b in theirs]
    torch.testing.assert_close(
        torch.tensor([a for a, _ in ours]), torch.tensor([a for a, _ in theirs]), atol=1e-4, rtol=0
    )
    assert lm.tokens_forwarded <= lm.tokens_asked


@pytest.mark.parametrize("recipe", ["gdn", "gla, pure"])
def test_states_of_prefixes_of_several_lengths_share_a_batch(tiny, tokenizer, monkeypatch, recipe):
    """What CUDA does with constant-size states: shared segments padded into one batch, leaves of all of them into one."""
    monkeypatch.setattr(PrefixLM, "inner_rows", 8)
    converted = convert(copy.deepcopy(tiny), RECIPES[recipe])
    shapes = []
    handle = converted.register_forward_pre_hook(
        lambda _, __, k: shapes.append(tuple(k["input_ids"].shape)), with_kwargs=True
    )
    ours = PrefixLM(converted, tokenizer, min_saving=16).loglikelihood(asked("loglikelihood", PAIRS))
    handle.remove()
    alone = PrefixLM(converted, tokenizer, batch_size=1, min_saving=10**9).loglikelihood(asked("loglikelihood", PAIRS))
    assert [b for _, b in ours] == [b for _, b in alone]
    torch.testing.assert_close(
        torch.tensor([a for a, _ in ours]), torch.tensor([a for a, _ in alone]), atol=1e-4, rtol=0
    )
    assert max(rows for rows, width in shapes if width > 90) == 2, "both shared prefixes at once"


def test_shared_prefixes_are_run_once(tiny, tokenizer):
    lm = PrefixLM(tiny, tokenizer, min_saving=1)
    lm.loglikelihood(asked("loglikelihood", PAIRS[:9]))
    assert lm.tokens_forwarded < 0.5 * lm.tokens_asked


def test_rolling_log_likelihoods_are_those_of_hflm(model, tokenizer):
    texts = [("A text that is longer than the sixteen tokens of a window, twice over.",), ("Short.",)]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=16)
    ours = PrefixLM(model, tokenizer, max_length=16)
    a = ours.loglikelihood_rolling(asked("loglikelihood_rolling", texts))
    b = theirs.loglikelihood_rolling(asked("loglikelihood_rolling", texts), disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, "auto"])
def test_generated_texts_are_those_of_hflm(model, tokenizer, batch_size):
    kinds = ({"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}, {"until": [], "max_gen_toks": 20})
    prompts = [(text, kind) for kind in kinds for text in (SHOTS, "Once upon a time", "Q:")]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2).generate_until(
        asked("generate_until", prompts), disable_tqdm=True
    )
    assert PrefixLM(model, tokenizer, batch_size=batch_size).generate_until(asked("generate_until", prompts)) == theirs


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_a_haystack_asked_several_things_is_run_once(model, tokenizer, batch_size):
    """Prompts that share their start, one of them twice, one inside another, one token alone: equal to HFLM's texts."""
    asked_for = ["Ann", "Bob", "the garden", "Ann"]
    texts = [*(f"{STORY * 2} What of {name}?" for name in asked_for), STORY * 2, f"{STORY} And?", "Q"]
    prompts = [(text, {"until": ["\n"], "max_gen_toks": 9}) for text in texts]
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2).generate_until(
        asked("generate_until", prompts), disable_tqdm=True
    )
    lm = PrefixLM(model, tokenizer, batch_size=batch_size)
    assert lm.generate_until(asked("generate_until", prompts)) == theirs
    if lm.runner.stateful:
        assert lm.tokens_forwarded < 0.5 * lm.tokens_asked, "the story twice, six times"


def test_generation_goes_on_when_decoding_runs_out_of_memory(tiny, tokenizer, monkeypatch):
    model = convert(copy.deepcopy(tiny), RECIPES["gdn"])
    prompts = [(f"{STORY} {text}", {"until": [], "max_gen_toks": 6}) for text in ("a", "b c", "a")]
    want = PrefixLM(model, tokenizer).generate_until(asked("generate_until", prompts))
    lm, steps = PrefixLM(model, tokenizer), []
    logits = lm.runner.logits

    def small(tokens, **options):
        steps.append(tokens.shape)
        if tokens.shape == (3, 1) and len([s for s in steps if s == (3, 1)]) == 3:
            raise torch.OutOfMemoryError
        return logits(tokens, **options)

    monkeypatch.setattr(lm.runner, "logits", small)
    assert lm.generate_until(asked("generate_until", prompts)) == want and (3, 1) in steps


def test_generation_stops_when_its_score_is_settled(tiny, tokenizer):
    prompts = [("Once upon a time", {"until": [], "max_gen_toks": 40})]
    whole = PrefixLM(tiny, tokenizer).generate_until(asked("generate_until", prompts))[0]
    cut = PrefixLM(tiny, tokenizer, settled=lambda _, text: len(text) >= 3).generate_until(
        asked("generate_until", prompts)
    )[0]
    assert whole.startswith(cut) and 3 <= len(cut) < len(whole)


def test_out_of_memory_halves_the_batch_and_changes_no_answer(tiny, tokenizer):
    """A hook that refuses large batches stands for a small device."""
    expected = PrefixLM(tiny, tokenizer).loglikelihood(asked("loglikelihood", PAIRS))
    refused = []

    def refuse(module, args, kwargs):
        if kwargs["input_ids"].shape[0] > 2:
            refused.append(kwargs["input_ids"].shape)
            raise torch.OutOfMemoryError("too many rows")

    handle = tiny.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        lm = PrefixLM(tiny, tokenizer)
        got = lm.loglikelihood(asked("loglikelihood", PAIRS))
    finally:
        handle.remove()
    assert refused and lm.budget < 2048
    torch.testing.assert_close(
        torch.tensor([a for a, _ in got]), torch.tensor([a for a, _ in expected]), atol=1e-5, rtol=0
    )


def test_a_tokenizer_that_adds_bos_adds_it_once(tiny, tokenizer):
    """Also before a text that brings its own, as HFLM does: twice is another prompt (lm-eval#1586)."""
    from tokenizers.processors import TemplateProcessing

    started = copy.deepcopy(tokenizer)
    started.add_special_tokens({"bos_token": "<s>"})
    bos = started.bos_token_id
    started.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    pairs = [("one two", " three"), ("<s>one two", " three"), ("", "<s>one"), ("", "one")]
    lm = PrefixLM(tiny, started)
    assert [tokens.count(bos) for tokens in lm._encode(["one two", "<s>one two"])] == [1, 1]
    ours = lm.loglikelihood(asked("loglikelihood", pairs))
    theirs = HFLM(pretrained=tiny, tokenizer=started).loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
    assert ours[0] == ours[1]
    torch.testing.assert_close(
        torch.tensor([a for a, _ in ours]), torch.tensor([a for a, _ in theirs]), atol=1e-4, rtol=0
    )


def test_a_prompt_is_never_cut(tiny, tokenizer):
    lm = PrefixLM(tiny, tokenizer, max_length=64)
    with pytest.raises(TruncationError, match=r"65 tokens.*64 positions"):
        lm.generate_until(asked("generate_until", [("x" * 60, {"until": [], "max_gen_toks": 5})]))
    with pytest.raises(TruncationError):
        lm.loglikelihood(asked("loglikelihood", [("x" * 64, "yy")]))
    with pytest.raises(ValueError, match="greedy"):
        lm.generate_until(asked("generate_until", [("x", {"do_sample": True})]))
