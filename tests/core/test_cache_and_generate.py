"""The constant-size cache under transformers' generate, forks, beams, documents."""

import pytest
import torch

from tests.core.tiny import linearized, tokens

FEW = ["gdn 6+3 conv mass", "hedgehog 6+3 conv", "kgla 0+0 conv", "gla 5+0", "none 6+3"]


def greedy(model, ids, steps, mask=None):
    """Greedy decoding without any cache: the whole sequence again for each token."""
    for _ in range(steps):
        with torch.no_grad():
            last = model(ids, attention_mask=mask).logits[:, -1]
        ids = torch.cat([ids, last.argmax(-1, keepdim=True)], 1)
        mask = None if mask is None else torch.cat([mask, mask.new_ones(mask.shape[0], 1)], 1)
    return ids


@pytest.mark.parametrize("recipe", FEW)
def test_generate_greedy_equals_no_cache(recipe):
    model, ids = linearized(recipe), tokens(11)
    assert torch.equal(model.generate(ids, max_new_tokens=15, do_sample=False), greedy(model, ids, 15))


@pytest.mark.parametrize("recipe", FEW)
def test_generate_with_left_padding(recipe):
    model, ids = linearized(recipe), tokens(11, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    for row, pads in enumerate((4, 0, 1)):
        assert torch.equal(got[row, pads:], greedy(model, ids[row : row + 1, pads:], 12)[0])


@pytest.mark.parametrize("recipe", FEW)
def test_beams_equal_transformers_without_cache(recipe):
    model, ids = linearized(recipe), tokens(9, batch=2)
    arguments = {"max_new_tokens": 10, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, **arguments), model.generate(ids, use_cache=False, **arguments))


def test_sampling_is_seeded_and_returns_several():
    model, ids = linearized(FEW[0]), tokens(9)
    arguments = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    first = model.generate(ids, **arguments)
    torch.manual_seed(0)
    assert torch.equal(first, model.generate(ids, use_cache=False, **arguments))


def test_continued_prefill():
    """A cache given to generate goes on: prompt, answer, second prompt."""
    model, ids = linearized(FEW[0]), tokens(30)
    cache = model.new_cache(1)
    with torch.no_grad():
        model(ids[:, :13], cache=cache)
    got = model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert torch.equal(got, greedy(model, ids, 10))


@pytest.mark.parametrize("layers", ["list:0", "list:1", "uniform:0.5"])
def test_layers_that_keep_softmax(layers):
    from linear_core.recipe import Recipe

    recipe = Recipe(mechanism="gdn", window=6, sinks=3, adaptation="conv", softmax_layers=layers)
    model, ids = linearized(recipe), tokens(11, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    got = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(got[0, 4:], greedy(model, ids[:1, 4:], 12)[0])
    assert torch.equal(got[1], greedy(model, ids[1:], 12)[0])
    cache = model.new_cache(1)
    with torch.no_grad():
        model(ids[1:], cache=cache)
        before = cache.nbytes
        model(ids[1:, :1], cache=cache)
    one_token = 2 * 2 * 16 * 4  # k and v, 2 heads of 16, float32: the kept layer's alone grows
    assert cache.nbytes == before + one_token


def test_fork_leaves_its_parent_alone():
    model, ids = linearized(FEW[0]), tokens(20)
    with torch.no_grad():
        cache = model.new_cache(1)
        model(ids, cache=cache)
        copy = cache.fork()
        model(tokens(5, seed=9), cache=copy)
        continued = model(ids[:, :3], cache=cache).logits
        whole = model(torch.cat([ids, ids[:, :3]], 1)).logits[:, -3:]
    torch.testing.assert_close(continued, whole, atol=1e-4, rtol=1e-4)


def test_exactly_w_plus_s_entries_and_constant_bytes():
    model = linearized("gdn 6+3 conv")
    cache = model.new_cache(2)
    start = cache.nbytes
    layer = cache.layers[0]
    with torch.no_grad():
        for length in (1, 7, 30):
            model(tokens(length, batch=2), cache=cache)
            assert cache.nbytes == start
            assert layer.k.shape[1] - layer.shape.tail + layer.sink_k.shape[1] == 6 + 3
            assert layer.gate_inputs.shape == (2, 6, 16 + 4)


def test_a_masked_step_leaves_the_cache_bit_for_bit():
    model, cache = linearized("gdn 6+3 conv"), None
    cache = model.new_cache(2)
    with torch.no_grad():
        model(tokens(12, batch=2), cache=cache)
        before = {name: t.clone() for name, t in cache.layers[1].tensors().items()}
        mask = torch.ones(2, 13, dtype=torch.long)
        mask[0, -1] = 0
        model(tokens(1, batch=2), attention_mask=mask, cache=cache)
    assert cache.positions.tolist() == [12, 13]
    for name, tensor in cache.layers[1].tensors().items():
        assert torch.equal(tensor[0], before[name][0]), name
        assert not torch.equal(tensor[1], before[name][1]) or name.startswith("sink"), name


def test_crop_and_foreign_caches_are_refused():
    from transformers import DynamicCache

    model = linearized("gdn 6+3")
    with pytest.raises(ValueError, match="cannot be cropped"):
        model.new_cache(1).crop(3)
    with pytest.raises(ValueError, match="its own cache"):
        model(tokens(3), past_key_values=DynamicCache())


@pytest.mark.parametrize("recipe", [*FEW, "gdn_scalar 0+0"])
def test_packed_documents_equal_separate_ones(recipe):
    """State, convolution, window, sinks and positions restart; documents shorter than s, w and w + s."""
    model = linearized(recipe)
    lengths = [2, 5, 8, 1, 9, 25, 14]
    ids = tokens(sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(ids.view(2, 32), document_ids=documents.view(2, 32)).logits.view(1, 64, -1)
        # the row border cuts the sixth document in two: [25] → 7 + 18
        start = 0
        for length in [2, 5, 8, 1, 9, 7, 18, 14]:
            alone = model(ids[:, start : start + length]).logits
            torch.testing.assert_close(packed[:, start : start + length], alone, atol=2e-4, rtol=2e-4)
            start += length


def test_document_ids_refuse_a_mask_and_a_cache():
    model, ids = linearized("gdn 6+3"), tokens(4)
    with pytest.raises(ValueError, match="document_ids goes with neither"):
        model(ids, document_ids=torch.zeros_like(ids), attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="document_ids must be"):
        model(ids, document_ids=torch.zeros(1, 9, dtype=torch.long))
