"""The Triton kernels and the step give what the token loop gives, on a CUDA device: outputs, states, every gradient.

The whole table comes from ``python -m linear_core.bench.forms --device cuda``; here is one case of each kind.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from linear_core.bench import forms
from linear_core.kernels import forced, l2_normalise
from linear_core.mechanisms import mechanism_class
from linear_core.models import REGISTRY
from linear_core.recipe import Recipe

TAKE_A_DECAY = ("linear_attention", "gated_linear_attention", "gated_delta_rule")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True, scope="module")
def untuned() -> Iterator[None]:
    """Compiling every configuration to time it would take minutes; one number of heads serves all tests for the same reason."""
    with forms.first_configuration():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gates", forms.GATES)
@pytest.mark.parametrize("rule", tuple(forms.RULES))
@pytest.mark.parametrize(("tokens", "form"), [(1, "step"), (65, "fla"), (257, "fla"), (100, "chunked")])
def test_forms_agree_on_the_gpu(rule: str, tokens: int, form: str, gates: str, dtype: torch.dtype) -> None:
    case = forms.Case(rule=rule, tokens=tokens, heads=9, kv_heads=3, size=64, gates=gates, with_state=True)
    for name, error in forms.compare(case, form, device="cuda", dtype=dtype).items():
        assert error <= forms.tolerance(name, "cuda", dtype), f"{case}: {name} is off by {error:.1e}"


def test_a_masked_token_leaves_the_state_bit_for_bit_on_the_gpu() -> None:
    for rule, form in itertools.product(TAKE_A_DECAY, ("step", "fla", "recurrent")):
        case = forms.Case(rule=rule, tokens=100 if form == "fla" else 1, heads=9, size=64, with_state=True)
        q, *masked, state = forms.inputs(case, "cuda", torch.bfloat16)
        _, end = forms.RULES[rule](q, *(torch.zeros_like(x) for x in masked), state, form)
        assert torch.equal(end, state), (rule, form)


def test_the_fused_norm_is_the_plain_norm() -> None:
    x = torch.randn(2, 33, 3, 64, device="cuda", requires_grad=True)
    weights = torch.randn_like(x)
    (fused,) = torch.autograd.grad((l2_normalise(x) * weights).sum(), x)
    plain = torch.stack([l2_normalise(x[:, t]) for t in range(33)], dim=1)
    torch.testing.assert_close(l2_normalise(x), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused, torch.autograd.grad((plain * weights).sum(), x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", TAKE_A_DECAY)
@pytest.mark.parametrize("value_size", [64, 65])
def test_one_token_in_one_kernel(rule: str, value_size: int) -> None:
    case = forms.Case(rule=rule, tokens=1, heads=9, size=64, value_size=value_size, gates="both", with_state=True)
    given = forms.inputs(case, "cuda", torch.bfloat16)
    for kernel, step in zip(forms.RULES[rule](*given, "recurrent"), forms.RULES[rule](*given, "step")):
        torch.testing.assert_close(kernel, step, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["hedgehog", "gla", "kgla", "gdn", "gdn_scalar"])
def test_a_mechanism_trains_as_on_the_chunked_form(name: str) -> None:
    """Outputs and the gradient of every parameter, with the first tokens not written (the pass that trains)."""
    shape = dataclasses.replace(REGISTRY["smollm2-135m"].shape, hidden=96)
    torch.manual_seed(0)
    mechanism = mechanism_class(name)(shape, Recipe(mechanism=name)).cuda()
    h, q, k, v = (torch.randn(2, 150, *size, device="cuda") for size in ((96,), (9, 64), (3, 64), (3, 64)))
    written = torch.arange(150, device="cuda")[None] >= 20
    parameters, weights, results = list(mechanism.parameters()), torch.randn(2, 150, 9, 1, device="cuda"), []
    for form in ("fla", "chunked"):
        with forced(form):
            out, _ = mechanism.update(q, k, v, mechanism.gate_inputs(h), written, None)
        results.append((out, *torch.autograd.grad((out * weights).sum(), parameters)))
    for label, fla, chunked in zip(("out", *(n for n, _ in mechanism.named_parameters())), *results):
        assert (fla - chunked).norm() <= 5e-3 * chunked.norm(), label


@pytest.mark.parametrize("rule", tuple(forms.RULES))
def test_a_captured_step_equals_the_eager_step(rule: str) -> None:
    case = forms.Case(rule=rule, tokens=1, heads=4, size=64, with_state=True)
    given = forms.inputs(case, "cuda", torch.bfloat16)
    forms.RULES[rule](*given, "step")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forms.RULES[rule](*given, "step")
    fresh = forms.inputs(forms.Case(rule=rule, tokens=1, heads=4, size=64, gates="both"), "cuda", torch.bfloat16)
    for old, new in zip(given, fresh):
        old.copy_(new)
    graph.replay()
    for replayed, eager in zip(captured, forms.RULES[rule](*fresh, "step")):
        assert torch.equal(replayed, eager)
