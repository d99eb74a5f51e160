"""The Triton kernels and the step give what the token loop gives, on a CUDA device: outputs, states, every gradient.

The whole table comes from ``python -m linear_core.bench.forms --device cuda``; here is one case of each kind.
"""

from __future__ import annotations

import pytest
import torch

from linear_core.bench import forms
from linear_core.kernels import l2_normalise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gates", forms.GATES)
@pytest.mark.parametrize("rule", tuple(forms.RULES))
@pytest.mark.parametrize(("tokens", "form"), [(1, "step"), (65, "fla"), (257, "fla"), (100, "chunked")])
def test_forms_agree_on_the_gpu(rule: str, tokens: int, form: str, gates: str, dtype: torch.dtype) -> None:
    case = forms.Case(rule=rule, tokens=tokens, heads=9, kv_heads=3, size=64, gates=gates, with_state=True)
    for name, error in forms.compare(case, form, device="cuda", dtype=dtype).items():
        assert error <= forms.tolerance(name, "cuda", dtype), f"{case}: {name} is off by {error:.1e}"


def test_a_masked_token_leaves_the_state_bit_for_bit_on_the_gpu() -> None:
    for rule, form in [(rule, form) for rule in forms.RULES for form in ("step", "fla")]:
        case = forms.Case(rule=rule, tokens=1 if form == "step" else 100, heads=2, size=64, with_state=True)
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
