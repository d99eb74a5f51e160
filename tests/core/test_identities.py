"""The identities of recipe section 2, for every mechanism × adaptation × merge × budget, new parameters randomised.

The dearest properties are drawn from all combinations here and gone through one by one in the tests marked slow.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linear_core.convert import attention_modules
from linear_core.exact import exact_attention, exact_attention_reference
from linear_core.layout import make_layout
from tests.core.tiny import base, linearized, tokens

RECIPES = [
    f"{mechanism} {budget} {adaptation} {merge}".strip()
    for mechanism in ("hedgehog", "gla", "kgla", "gdn", "gdn_scalar")
    for budget in ("0+0", "5+0", "6+3")
    for adaptation in ("none", "conv", "lora")
    for merge in ("", "mass")
] + ["none 5+0", "none 6+3 lora"]
WITH_BUDGET = [r for r in RECIPES if "0+0" not in r]
FEW = ["gdn 6+3 conv mass", "hedgehog 6+3 conv", "kgla 0+0 conv", "gla 5+0", "none 6+3", "gdn_scalar 6+3 lora"]
CLOSE = {"atol": 1e-3, "rtol": 1e-3}


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("recipe", WITH_BUDGET)
def test_short_input_equals_the_base(recipe):
    """T ≤ w + s: the converted model is the base, whatever its new parameters (LoRA excepted: it moves the exact path)."""
    family = "qwen3" if len(recipe) % 2 else "llama"
    ids = tokens(9 if "6+3" in recipe else 5, batch=2)
    expected = logits(base(family), ids)
    model = linearized(recipe, family)
    if "lora" in recipe:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
    torch.testing.assert_close(logits(model, ids), expected, **CLOSE)


def check_pieces(recipe, family, length, left, right, sizes, steps=9):
    """Whole sequence = pieces of these sizes, three rows with their own left and right pads, then decoding past w + s."""
    model = linearized(recipe, family)
    left, right = torch.tensor(left), torch.tensor(right)
    column = torch.arange(length)
    mask = (column >= left[:, None]) & (column < (length - right)[:, None])
    mask = torch.cat([mask, torch.ones(3, steps, dtype=torch.bool)], 1)
    ids = tokens(mask.shape[1], batch=3)
    whole = logits(model, ids, attention_mask=mask.long())
    cache, done, pieces = model.new_cache(3), 0, []
    empty = cache.nbytes
    for size in [*sizes, *[1] * steps]:
        last = min(done + size, length if done < length else mask.shape[1])
        pieces.append(logits(model, ids[:, done:last], attention_mask=mask[:, :last].long(), cache=cache))
        done = last
        assert cache.nbytes == empty
    assert done == mask.shape[1]
    torch.testing.assert_close(torch.cat(pieces, 1)[mask], whole[mask], **CLOSE)
    assert cache.positions.tolist() == mask.sum(1).tolist()
    for row in range(3):  # and each row is what it is alone
        alone = logits(model, ids[row : row + 1, mask[row]])
        torch.testing.assert_close(whole[row, mask[row]], alone[0], **CLOSE)


def split(data, length):
    sizes = []
    while sum(sizes) < length:
        sizes.append(min(data.draw(st.sampled_from([1, 3, 6, 7, 64])), length - sum(sizes)))
    return sizes


@settings(max_examples=40)
@given(data=st.data())
def test_whole_is_pieces_with_pads_on_both_sides(data):
    length = data.draw(st.sampled_from([9, 15, 28]))
    pads = st.lists(st.integers(0, 4), min_size=3, max_size=3)
    check_pieces(
        data.draw(st.sampled_from(RECIPES)), data.draw(st.sampled_from(["llama", "qwen3"])), length,
        data.draw(pads), data.draw(pads), split(data, length),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@given(data=st.data())
def test_whole_is_pieces_for_every_combination(recipe, data):
    length = data.draw(st.sampled_from([9, 15, 28]))
    pads = st.lists(st.integers(0, 4), min_size=3, max_size=3)
    check_pieces(
        recipe,
        data.draw(st.sampled_from(["llama", "qwen3"])),
        length,
        data.draw(pads),
        data.draw(pads),
        split(data, length),
    )


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("length", [63, 64, 65, 100, 257])
def test_long_sequences_in_two_pieces(recipe, length):
    model = linearized(recipe)
    ids, cache = tokens(length), model.new_cache(1)
    whole = logits(model, ids)
    pieces = [logits(model, ids[:, a:b], cache=cache) for a, b in ((0, length // 2), (length // 2, length))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)


@pytest.mark.parametrize("window,sinks", [(1, 0), (5, 0), (6, 3), (64, 2), (300, 8)])
@pytest.mark.parametrize("length", [1, 7, 64, 130])
def test_exact_path_is_its_definition(window, sinks, length):
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, length, 6, 8, generator=generator)
    k, v = torch.randn(2, 2, length, 3, 8, generator=generator)
    pad = torch.zeros(2, window - 1, 3, 8)
    sink = lambda x: torch.nn.functional.pad(x[:, :sinks], (0, 0, 0, 0, 0, max(0, sinks - length)))  # noqa: E731
    o, lse = exact_attention(q, torch.cat([pad, k], 1), torch.cat([pad, v], 1), sink(k), sink(v), window=window)
    expected, expected_lse = exact_attention_reference(q, k, v, window=window, sinks=sinks)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window,sinks", [(4, 0), (5, 2), (0, 0), (1, 1)])
def test_two_paths_are_disjoint_and_cover(window, sinks):
    """Values one-hot in the position: what an output holds is the set of positions that reached it."""
    length = 16
    model = linearized(f"gla {window}+{sinks}", layers=1)
    attention = attention_modules(model)[0]
    q = torch.rand(1, length, 4, 16) + 0.1  # positive products: nothing cancels
    k = torch.rand(1, length, 2, 16) + 0.1
    v = torch.eye(length)[None, :, None].expand(1, length, 2, 16)
    gates = torch.zeros(1, length, 16)
    reached = {}
    for paths in ("exact", "linear"):
        layout = make_layout(1, length, q.device, paths=paths)
        if not window and paths == "exact":
            reached[paths] = torch.zeros(length, length, dtype=torch.bool)
            continue
        if paths == "linear" and window:
            both = attention.attend(q, k, v, gates, q, make_layout(1, length, q.device), None)
            exact = attention.attend(q, k, v, gates, q, make_layout(1, length, q.device, paths="exact"), None)
            y = (both - exact).where((both - exact).abs() > 1e-6, 0)
            assert torch.allclose(attention.attend(q, k, v, gates, q, layout, None), both - exact, atol=1e-6)
        else:
            y = attention.attend(q, k, v, gates, q, layout, None)
        reached[paths] = y[0, :, 0] != 0
    t = torch.arange(length)
    behind = t[:, None] - t
    near = (behind >= 0) & ((behind < window) | (t < sinks))
    assert torch.equal(reached["exact"], near)
    assert torch.equal(reached["linear"], (behind >= 0) & ~near)


@pytest.mark.parametrize("recipe", FEW)
def test_causality(recipe):
    model = linearized(recipe)
    ids = tokens(40)
    changed = ids.clone()
    changed[0, 25] = (ids[0, 25] + 1) % 97
    before, after = logits(model, ids), logits(model, changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


@pytest.mark.parametrize("mechanism", ["gla", "kgla", "gdn", "gdn_scalar", "hedgehog"])
@pytest.mark.parametrize("conv", ["none", "conv"])
def test_a_token_enters_the_state_w_steps_late_with_its_own_gate(mechanism, conv):
    """One layer, linear path alone: h at token i moves the read from i + w on, through k, v, gate and beta alike."""
    window, sinks, i = 6, 2, 10
    model = linearized(f"{mechanism} {window}+{sinks} {conv} {'mass' if mechanism == 'hedgehog' else ''}", layers=1)
    attention = attention_modules(model)[0]
    generator = torch.Generator().manual_seed(3)
    q, h = torch.randn(1, 30, 4, 16, generator=generator), torch.randn(1, 30, 48, generator=generator)
    k, v = torch.randn(2, 1, 30, 2, 16, generator=generator)

    def read(change):
        parts = {
            "k": k,
            "v": v,
            "gates": attention.mechanism.gate_inputs(h) if attention.mechanism.num_gate_inputs else None,
        }
        if change:
            parts[change] = parts[change].clone()
            parts[change][:, i] += 1
        layout = make_layout(1, 30, q.device, paths="linear")
        layout.num_tokens = None
        exact_free = {"k": parts["k"], "v": parts["v"]}
        k_all = attention._behind(exact_free["k"], None)
        v_all = attention._behind(exact_free["v"], None)
        return attention._read_state(q, k_all, v_all, attention._behind_gates(parts["gates"], None), layout, None)[0]

    with torch.no_grad():
        same = read(None)
        for change in ("k", "v", "gates") if attention.mechanism.num_gate_inputs else ("k", "v"):
            moved = (read(change) != same).flatten(2).any(-1)[0]
            assert moved.nonzero()[0].item() == i + window, change


def check_gradients(recipe, length):
    """Empty state, T = 1, w + s and w + s + 1, an all-pad row: nothing but finite numbers."""
    model = linearized(recipe)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1] = 0
    output = model(tokens(length, batch=2), attention_mask=mask).logits
    assert output.isfinite().all()
    if not output.requires_grad:
        return  # one token on an empty state meets no gate
    output.square().mean().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name


@settings(max_examples=40)
@given(recipe=st.sampled_from(RECIPES), length=st.sampled_from([1, 9, 10]))
def test_gradients_are_finite_at_the_edges(recipe, length):
    check_gradients(recipe, length)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("length", [1, 9, 10])
def test_gradients_are_finite_for_every_combination(recipe, length):
    check_gradients(recipe, length)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_in_every_layer_is_the_base_to_the_bit(family, masked):
    """A lost frozen operation (q/k norm, RoPE scaling, tied embeddings) would show here."""
    from linear_core.convert import convert
    from linear_core.recipe import Recipe

    ids = tokens(33, batch=2)
    mask = None
    if masked:
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
    expected_model = base(family)
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    expected = logits(expected_model, ids, attention_mask=mask, position_ids=positions)
    got = logits(convert(base(family), Recipe(mechanism="softmax")), ids, attention_mask=mask)
    keep = slice(None) if mask is None else mask.bool()
    assert torch.equal(got[keep], expected[keep])


@pytest.mark.parametrize("recipe", FEW)
def test_base_paths_are_the_base_to_the_bit(recipe):
    from linear_core.convert import base_attention

    ids = tokens(33, batch=2)
    model = linearized(recipe)
    with base_attention(model):
        got = logits(model, ids, paths="base")
    assert torch.equal(got, logits(base(), ids))

