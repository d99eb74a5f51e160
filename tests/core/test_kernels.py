"""Every form of the two state updates gives what the token loop gives: outputs, final state and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from linear_core.bench import forms
from linear_core.kernels import fla, gated_delta_rule, gated_linear_attention, l2_normalise, norm, tune, tuned

LENGTHS = (1, 7, 63, 64, 65, 100, 257)
RULES = tuple(forms.RULES)
MASKABLE = tuple(rule for rule in RULES if rule != "low_rank_delta_rule")  # that one has no decay of 0
RULES_AND_GATES = [
    (rule, gates) for rule in RULES for gates in forms.GATES if rule != "linear_attention" or gates == "both"
]
TOLERANCE = 1e-5  # relative, float32


def _worst(errors: dict[str, float]) -> tuple[str, float]:
    return max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("rule", "gates"), RULES_AND_GATES)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_equals_the_token_loop(rule: str, tokens: int, gates: str) -> None:
    for with_state in (False, True):
        case = forms.Case(rule=rule, tokens=tokens, heads=1, size=64, gates=gates, with_state=with_state, batch=1)
        name, error = _worst(forms.compare(case, "chunked", device="cpu", dtype=torch.float32))
        assert error <= TOLERANCE, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (4, 128), (8, 64)])
def test_chunked_for_other_shapes(rule: str, heads: int, size: int) -> None:
    case = forms.Case(rule=rule, tokens=65, heads=heads, size=size, gates="both", with_state=True)
    name, error = _worst(forms.compare(case, "chunked", device="cpu", dtype=torch.float32))
    assert error <= TOLERANCE, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gates", forms.GATES)
def test_step_equals_the_token_loop(rule: str, gates: str) -> None:
    for with_state in (False, True):
        case = forms.Case(rule=rule, tokens=1, heads=4, size=64, gates=gates, with_state=with_state)
        name, error = _worst(forms.compare(case, "step", device="cpu", dtype=torch.float32))
        assert error <= TOLERANCE, f"{case}: {name} is off by {error:.1e}"


@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_inputs_are_computed_in_float32(rule: str) -> None:
    case = forms.Case(rule=rule, tokens=100, heads=2, size=64, gates="usual", with_state=True)
    errors = forms.compare(case, "chunked", device="cpu", dtype=torch.bfloat16)
    assert errors["state"] <= TOLERANCE
    assert _worst(errors)[1] <= 1e-2
    q, k, v, decay, beta, _ = forms.inputs(case, "cpu", torch.bfloat16)
    out, state = forms.RULES[rule](q, k, v, decay, beta, None, "chunked")
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("rule", RULES)
def test_any_split_gives_the_whole(rule: str) -> None:
    case = forms.Case(rule=rule, tokens=150, heads=2, size=64, gates="both", with_state=True)
    q, k, v, decay, beta, state = forms.inputs(case, "cpu", torch.float32)
    whole, end = forms.RULES[rule](q, k, v, decay, beta, state, None)
    pieces, position = [], 0
    for length in (1, 3, 7, 64, 1, 74):
        cut = [x[:, position : position + length] for x in (q, k, v, decay, beta)]
        out, state = forms.RULES[rule](*cut, state, None)
        pieces.append(out)
        position += length
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["reference", "chunked", "step"])
@pytest.mark.parametrize("rule", MASKABLE)
def test_a_masked_token_leaves_the_state_bit_for_bit(rule: str, form: str) -> None:
    tokens = 1 if form == "step" else 70
    case = forms.Case(rule=rule, tokens=tokens, heads=2, size=64, gates="usual", with_state=True)
    q, *masked, state = forms.inputs(case, "cpu", torch.float32)
    _, end = forms.RULES[rule](q, *(torch.zeros_like(x) for x in masked), state, form)
    assert torch.equal(end, state)


@pytest.mark.parametrize("rule", MASKABLE)
def test_masked_tokens_at_the_end_change_nothing(rule: str) -> None:
    case = forms.Case(rule=rule, tokens=70, heads=2, size=64, gates="both", with_state=True)
    q, *rest, state = forms.inputs(case, "cpu", torch.float32)
    out, end = forms.RULES[rule](q[:, :50], *(x[:, :50] for x in rest), state, "chunked")
    masked = [F.pad(x[:, :50].movedim(1, -1), (0, 20)).movedim(-1, 1) for x in rest]
    longer, same = forms.RULES[rule](q, *masked, state, "chunked")
    torch.testing.assert_close(longer[:, :50], out)
    torch.testing.assert_close(same, end)


@pytest.mark.parametrize("rule", RULES)
def test_the_future_changes_nothing(rule: str) -> None:
    case = forms.Case(rule=rule, tokens=100, heads=2, size=64, gates="both", with_state=True)
    *sequence, state = forms.inputs(case, "cpu", torch.float32)
    before, _ = forms.RULES[rule](*sequence, state, "chunked")
    for x in sequence:
        x[:, 77:] = x[:, 77:].flip(1)
    after, _ = forms.RULES[rule](*sequence, state, "chunked")
    assert torch.equal(before[:, :77], after[:, :77])


def test_delta_rule_writes_a_one_hot_key_exactly() -> None:
    """β = 1 and a unit key: the read of that key is the value last written, in every form."""
    k = F.one_hot(torch.arange(130) % 16, 16).float().view(1, 130, 1, 16)
    v = torch.randn(1, 130, 1, 16)
    ones, zeros = torch.ones(1, 130, 1), torch.zeros(1, 130, 1, 16)
    for form in ("reference", "chunked"):
        out, state = gated_delta_rule(k, k, v, zeros, ones, implementation=form)
        torch.testing.assert_close(out, v)
        torch.testing.assert_close(state[0, 0, torch.arange(114, 130) % 16], v[0, 114:, 0])


@pytest.mark.parametrize("value", [-1e4, float("-inf"), 0.0])
def test_gradients_are_finite_at_the_ends_of_the_gate(value: float) -> None:
    case = forms.Case(rule="gated_delta_rule", tokens=100, heads=2, size=64, gates="usual", with_state=True)
    q, k, v, decay, beta, state = (x.requires_grad_() for x in forms.inputs(case, "cpu", torch.float32))
    ends = torch.full_like(decay, value).requires_grad_()
    for out, end in (
        gated_delta_rule(q * 0, k * 0, v, ends, beta, state=state),
        gated_delta_rule(q, k, v, ends, torch.ones_like(beta), state=state),
        gated_linear_attention(q, k, v, ends, state=state),
    ):
        grads = torch.autograd.grad(out.sum() + end.square().sum(), (q, k, v, ends, state), allow_unused=True)
        assert all(torch.isfinite(g).all() for g in (out, end, *grads) if g is not None)


def test_norm_is_finite_at_zero() -> None:
    x = torch.zeros(1, 2, 1, 8, requires_grad=True)
    l2_normalise(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
    y = torch.randn(2, 3, 4, 64)
    torch.testing.assert_close(l2_normalise(y).norm(dim=-1), torch.ones(2, 3, 4), rtol=1e-5, atol=1e-5)


def test_the_kernels_of_fla_are_where_we_look() -> None:
    for module, name in (("kda", "chunk_kda"), ("gla", "chunk_gla"), ("simple_gla", "chunk_simple_gla")):
        assert callable(fla.kernel(module, name))
    for module, name in (("kda", "fused_recurrent_kda"), ("gla", "fused_recurrent_gla")):
        assert callable(fla.kernel(module, name))
    assert callable(norm.fused())


def test_refusals_name_the_shapes() -> None:
    q, v, beta = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match=r"state \[1, 2, 8, 9\]"):
        gated_linear_attention(q, q, v, None, state=torch.zeros(1, 2, 8, 9))
    with pytest.raises(ValueError, match="not known; allowed: reference"):
        gated_linear_attention(q, q, v, None, implementation="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs CUDA"):
        gated_delta_rule(q, q, v, q, beta, implementation="fla")
    with pytest.raises(ValueError, match="takes one token, not 4"):
        gated_delta_rule(q, q, v, q, beta, implementation="step")
    with pytest.raises(ValueError, match="needs log_decay"):
        gated_delta_rule(q, q, v, None, beta)


@pytest.mark.parametrize("rule", RULES)
def test_the_step_compiles_without_a_graph_break(rule: str) -> None:
    """No branch on data and no synchronisation: what CUDA graphs and torch.compile need of the decode step."""
    case = forms.Case(rule=rule, tokens=1, heads=2, size=16, gates="usual", with_state=True)
    given = forms.inputs(case, "cpu", torch.float32)
    step = torch.compile(lambda *x: forms.RULES[rule](*x, "step"), fullgraph=True, backend="eager")
    for compiled, eager in zip(step(*given), forms.RULES[rule](*given, "step")):
        assert torch.equal(compiled, eager)


def test_the_first_configuration_is_the_smallest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compares the kernels on a GPU without tuning them: too large a tile is passed over, tuned elsewhere or not."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    from triton.runtime.errors import OutOfResources

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched = []

    class Kernel:
        fn = staticmethod(lambda T: None)

        def run(self, *args: object, **options: int) -> None:
            if options["num_stages"] > 2 or options["BK"] < 32:
                raise OutOfResources(options["num_stages"], 2, "shared memory")
            launched.append((options["BK"], options["num_stages"]))

    sizes = [(128, 4), (64, 2), (16, 2), (32, 3), (32, 2)]
    configs = [autotuner.Config({"BK": tile}, num_stages=stages) for tile, stages in sizes]
    kernel = autotuner.Autotuner(Kernel(), ["T"], configs, ["T"], None, None, cache_results=True)
    tuned.tune_what_does_not_fit()
    before = dict(vars(autotuner.Autotuner))
    with forms.first_configuration():
        kernel.run(100)
        kernel.run(100)
        kernel.cache[(257,)] = configs[0]  # from a file, tuned for other sizes
        kernel.run(257)
    assert launched == [(32, 2)] * 5  # tried and run, run, tried and run
    assert dict(vars(autotuner.Autotuner)) == before and not list(tmp_path.rglob("*"))


def test_a_size_that_was_not_tuned_takes_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("fla.ops.utils.cache")
    monkeypatch.setattr(cache.KernelConfigFile, "lookup_fuzzy", None)  # as it was, at the end
    tuned.take_the_nearest.__wrapped__()
    entries = {str(i): {"autotune_key": key, "config": i} for i, key in enumerate(([32, 128, "bf16"], [9, 64, "bf16"], [8, 64, "f32"]))}
    file = cache.KernelConfigFile(None, None, entries, None)
    wanted = {(16, 128, "bf16"): 0, (8, 64, "bf16"): 1, (64, 256, "f32"): 2}
    for key, number in wanted.items():
        assert file.lookup_fuzzy(cache.AutotuneKey(key))["config"] == number
    assert file.lookup_fuzzy(cache.AutotuneKey((9, 64, "f16"))) is None


def test_parts_of_a_tuning_are_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    configs = list(range(7))
    for parts in (1, 3, 15):
        taken = []
        for part in range(parts):
            with monkeypatch.context() as patch:
                patch.setattr(autotuner.Autotuner, "prune_configs", lambda self, kwargs: configs)
                tune.take_part(part, parts)
                taken.append(autotuner.Autotuner.prune_configs(None, {}))
        assert all(taken) and set().union(*taken) == set(configs)


def test_a_form_that_fails_costs_its_own_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*given: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setitem(forms.RULES, "gated_delta_rule", broken)
    monkeypatch.setattr(forms, "cases", lambda tiny, heads: [forms.Case(rule=r, tokens=7, heads=1, size=16) for r in RULES])
    assert forms.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "6 of 8 rows within tolerance" in printed and "1e-05, 1e-05" in printed
    assert "FAILED: gated_delta_rule chunked float32 usual: T=7 H=1/1 D=16: RuntimeError: out of resource" in printed
