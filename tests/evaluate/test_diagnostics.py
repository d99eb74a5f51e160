"""The formulas on cases worked out by hand, and the streaming sums against the definitions."""

import copy
import csv
import math

import pytest
import torch

from linear_core.convert import attention_modules, convert, new_parameters
from linear_core.diagnostics import Diagnostics, concentration_and_residual, diagnose, draw, hardest_layers, unit_keys
from linear_core.recipe import Recipe


def test_equal_keys_are_concentrated_and_leave_no_residual():
    keys = torch.tensor([[1.0, 0.0]] * 4)
    concentration, residual = concentration_and_residual(keys)
    torch.testing.assert_close(concentration, torch.ones(4))
    torch.testing.assert_close(residual, torch.zeros(4))


def test_two_orthogonal_keys():
    """k̄ = (½, ½), ‖k̄‖ = 1/√2; both keys lie 1/√2 along it: C = 1/√2, and they project exactly onto ‖k̄‖."""
    concentration, residual = concentration_and_residual(torch.eye(2))
    torch.testing.assert_close(concentration, torch.tensor([1.0, 2**-0.5]))
    torch.testing.assert_close(residual, torch.zeros(2), atol=1e-6, rtol=0)


def test_three_keys_by_hand():
    """k̃ = (1,0), (1,0), (0,1): k̄ = (⅔, ⅓), ‖k̄‖ = √5/3. Along it: 2/√5, 2/√5, 1/√5."""
    concentration, residual = concentration_and_residual(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    along, norm = torch.tensor([2.0, 2.0, 1.0]) / math.sqrt(5), math.sqrt(5) / 3
    assert concentration[2] == pytest.approx(1 / math.sqrt(5))
    assert residual[2] == pytest.approx(float((along - norm).abs().mean()))


def test_the_gram_form_is_the_definition():
    keys = unit_keys(torch.randn(2, 9, 3, 5, generator=torch.Generator().manual_seed(0)) + 0.5)
    concentration, residual = concentration_and_residual(keys)
    for t in range(9):
        mean = keys[:, :, : t + 1].mean(2)
        norm = mean.norm(dim=-1)
        torch.testing.assert_close(concentration[:, :, t], torch.cosine_similarity(keys[:, :, t], mean, dim=-1))
        projected = (
            (keys[:, :, : t + 1] * mean[:, :, None]).sum(-1, keepdim=True)
            / norm[..., None, None] ** 2
            * mean[:, :, None]
        )
        expected = (projected - mean[:, :, None]).norm(dim=-1).mean(-1)
        torch.testing.assert_close(residual[:, :, t], expected)


@pytest.fixture(scope="module")
def converted(tiny):
    model = convert(copy.deepcopy(tiny), Recipe.parse("gdn 4+2"))
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="module")
def windows():
    return list(torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(2)))


def layer_outputs(model, tokens, paths, inputs=None):
    """Each attention layer's output; ``inputs``: what it is given in place of its own."""
    seen, handles = [], []
    for i, module in enumerate(attention_modules(model)):
        if inputs is not None:
            handles.append(module.register_forward_pre_hook(
                lambda m, a, k, i=i: (a, {**k, "hidden_states": inputs[i]}), with_kwargs=True))  # fmt: skip
        handles.append(
            module.register_forward_hook(
                lambda m, a, k, out: seen.append((k["hidden_states"], out[0])), with_kwargs=True
            )
        )
    with torch.no_grad():
        model(tokens, paths=paths)
    for handle in handles:
        handle.remove()
    return seen


def test_nmse_is_its_definition_on_the_bases_inputs(converted, windows):
    found = diagnose(converted, windows)
    full, linear = [], []
    for window in windows:
        base = layer_outputs(converted, window[None], "base")
        full.append([y for _, y in base])
        linear.append([y for _, y in layer_outputs(converted, window[None], "hybrid", [x for x, _ in base])])
    for i in range(3):
        y, z = (torch.stack([each[i][0] for each in group]) for group in (full, linear))
        variance = y.var(correction=0)
        assert found.nmse[i] == pytest.approx(float((y - z).square().mean() / variance), rel=1e-4)
        assert found.position_nmse[i][20] == pytest.approx(float((y - z)[:, 20].square().mean() / variance), rel=1e-4)
        assert max(found.position_nmse[i][:6]) < 1e-9, "no longer than window and sinks: nothing is lost"
    for rows in found.bins.values():
        assert sum(row["tokens"] for row in rows) == 3 * 3 * 24
        mean = sum(row["nmse"] * row["tokens"] for row in rows) / (3 * 3 * 24)
        assert mean == pytest.approx(sum(found.nmse) / 3, rel=1e-6)


def test_base_and_conversion_have_the_same_keys(tiny, converted, windows):
    base, linear = diagnose(tiny, windows), diagnose(converted, windows)
    assert base.nmse is None and base.bins == {}
    assert base.concentration == pytest.approx(linear.concentration) and base.residual == pytest.approx(linear.residual)
    assert hardest_layers(tiny, windows, 0.34) == hardest_layers(converted, windows, 0.34)
    with pytest.raises(ValueError, match="needs a linearized model"):
        base.hardest(0.5, "nmse")


def ranked(hardness, nmse):
    n = len(hardness)
    return Diagnostics(list(range(n)), [0.0] * n, [0.0] * n, hardness, nmse, [[]] * n, [[]] * n, None, {}, 0)


def test_hardest_layers_ties_go_to_the_lower_layer():
    found = ranked([1.5, 3.0, 3.0, 3.0], [0.1, 0.2, 0.9, 0.3])
    assert found.hardest(0.5) == (1, 2)
    assert found.hardest(0.25, "nmse") == (2,)
    assert found.hardest(0.01) == (1,), "at least one"
    with pytest.raises(ValueError, match="keys, nmse"):
        found.hardest(0.5, "size")


def test_what_was_found_is_saved_and_drawn(converted, windows, tmp_path):
    found = diagnose(converted, windows)
    found.save(tmp_path)
    rows = list(csv.DictReader((tmp_path / "layers.csv").open()))
    assert [float(row["nmse"]) for row in rows] == found.nmse
    assert len(list(csv.DictReader((tmp_path / "positions.csv").open()))) == 3 * 24
    made = draw(found, tmp_path)
    assert [p.name for p in made] == ["by_token.png", "by_keys.png", "by_layer.png"] and all(
        p.stat().st_size > 5000 for p in made
    )


def test_unequal_or_overlong_windows_are_refused(tiny, windows):
    with pytest.raises(ValueError, match="one length"):
        diagnose(tiny, [windows[0], windows[1][:10]])
    with pytest.raises(ValueError, match="2048"):
        diagnose(tiny, [torch.zeros(2049, dtype=torch.long)])
