"""Each mechanism: its equation, its parameters and start values, its forms, and how a new one is added."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from linear_core.mechanisms import MECHANISMS, mechanism_class
from linear_core.mechanisms.base import Mechanism
from linear_core.models import REGISTRY, Shape
from linear_core.recipe import Recipe

NAMES = [name for name, location in MECHANISMS.items() if location]
WITH_STATE = [name for name in NAMES if name != "none"]
SHAPE = dataclasses.replace(REGISTRY["smollm2-135m"].shape, hidden=48, heads=6, kv_heads=2, head_dim=16)


def make(name: str, shape: Shape = SHAPE, *, random: bool = False, **changes) -> Mechanism:
    """A mechanism with a fixed seed; random: every new parameter from N(0, 0.5²), for starts hide faults."""
    torch.manual_seed(0)
    mechanism = mechanism_class(name)(shape, Recipe(mechanism=name, **changes))
    if random:
        for parameter in mechanism.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return mechanism


def sequence(shape: Shape, tokens: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [B, T, C], q [B, T, H, D], k and v [B, T, G, D]."""
    torch.manual_seed(1)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return torch.randn(batch, tokens, shape.hidden), *(torch.randn(batch, tokens, n, shape.head_dim) for n in heads)


def prepare(mechanism: Mechanism, h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """What the attention module passes to ``parallel`` (without the state)."""
    q, k = mechanism.features(q, k)
    return q, k, mechanism.values(v), *mechanism.gates(mechanism.gate_inputs(h), k)


def cut(values: tuple[Tensor | None, ...], part: slice) -> list[Tensor | None]:
    return [None if x is None else x[:, part] for x in values]


def written_out(name: str, mechanism: Mechanism, h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Recipe section 3's table as it stands there, one matrix a token, from the parameters themselves."""
    B, T, H, D = q.shape
    p = {n: x.double() for n, x in mechanism.named_parameters()}
    h, q, k, v = (x.double() for x in (h, q, k, v))
    k, v = (x.repeat_interleave(H // x.shape[2], dim=2) for x in (k, v))
    if name == "hedgehog":
        Wq, bq, Wk, bk = (p[n] for n in ("q_map.weight", "q_map.bias", "k_map.weight", "k_map.bias"))
        Wk, bk = (x.repeat_interleave(H // x.shape[0], dim=0) for x in (Wk, bk))
        q, k = (torch.einsum("bthd,hdf->bthf", x, W) + b for x, W, b in ((q, Wq, bq), (k, Wk, bk)))
        q, k = (torch.cat((x.softmax(-1), (-x).softmax(-1)), dim=-1) for x in (q, k))
        scores = torch.einsum("bthd,bshd->bhts", q, k).tril()
        return torch.einsum("bhts,bshd->bthd", scores, v), scores.sum(-1).mT
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    a = torch.sigmoid(h @ p["gate.down.weight"].T @ p["gate.up.weight"].T + p["gate.up.bias"]).view(B, T, H, -1)
    a = a.expand(B, T, H, D)
    if name != "gla":
        beta = torch.sigmoid(h @ p["beta.weight"].T + p["beta.bias"])[..., None, None]
    S, eye, outputs = torch.zeros(B, H, D, D, dtype=torch.float64), torch.eye(D, dtype=torch.float64), []
    for t in range(T):
        kt, vt, decay = k[:, t, :, :, None], v[:, t, :, None, :], torch.diag_embed(a[:, t])
        if name == "gla":
            S = decay @ S + kt @ vt
        elif name == "kgla":
            S = decay @ (eye - beta[:, t] * torch.diag_embed(kt.squeeze(-1) ** 2)) @ S + kt @ vt
        else:
            S = (eye - beta[:, t] * kt @ kt.mT) @ decay @ S + beta[:, t] * kt @ vt
        outputs.append((q[:, t, :, None, :] @ S).squeeze(-2))
    return torch.stack(outputs, dim=1), S


@pytest.mark.parametrize("name", ["hedgehog", "gla", "kgla", "gdn", "gdn_scalar"])
def test_the_equation_of_the_recipe(name: str) -> None:
    mechanism = make(name, random=True).requires_grad_(False)
    h, q, k, v = sequence(SHAPE, 70, batch=1)
    out, state = mechanism.parallel(*prepare(mechanism, h, q, k, v), None)
    wanted, end = written_out(name, mechanism, h, q, k, v)
    if mechanism.normalised:
        torch.testing.assert_close(out[..., -1].double(), end, rtol=1e-5, atol=1e-5)
        out = out[..., :-1]
    else:
        torch.testing.assert_close(state.double(), end, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WITH_STATE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (3, 1, 64), (8, 2, 128), (8, 1, 64)])
def test_whole_pieces_and_tokens_agree(name: str, heads: int, kv_heads: int, head_dim: int) -> None:
    shape = dataclasses.replace(SHAPE, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    mechanism = make(name, shape, random=True)
    whole = prepare(mechanism, *sequence(shape, 70))
    out, end = mechanism.parallel(*whole, None)
    pieces, state = [], mechanism.init_state(2, "cpu")
    assert state.shape == end.shape and state.dtype == torch.float32
    for part in (slice(0, 65), *(slice(t, t + 1) for t in range(65, 70))):
        form = mechanism.step if part.start else mechanism.parallel
        piece, state = form(*cut(whole, part), state)
        pieces.append(piece)
    for got, wanted in ((torch.cat(pieces, dim=1), out), (state, end)):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("name", WITH_STATE)
def test_every_new_parameter_gets_a_finite_gradient(name: str) -> None:
    mechanism = make(name)
    h, q, k, v = sequence(SHAPE, 9)
    h[:, 3], k[:, 3], q[:, 4] = 0, 0, 0
    leaves = [x.requires_grad_() for x in (h, q, k, v)]
    out, _ = mechanism.parallel(*prepare(mechanism, *leaves), None)
    (out * torch.randn_like(out)).sum().backward()
    for label, x in (*mechanism.named_parameters(), *zip("qkv", leaves[1:])):
        assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0, label


@pytest.mark.parametrize("name", ["gla", "kgla", "gdn", "gdn_scalar"])
@pytest.mark.parametrize("bias", [-1e4, 1e4])
def test_extreme_gates_are_finite_with_finite_gradients(name: str, bias: float) -> None:
    mechanism = make(name, gate_bias=bias)
    if hasattr(mechanism, "beta"):
        torch.nn.init.constant_(mechanism.beta.bias, 50.0)
    h, q, _, v = sequence(SHAPE, 40)
    k = F.one_hot(torch.arange(40) % 16, 16).float().view(1, 40, 1, 16).expand_as(v)
    out, state = mechanism.parallel(*prepare(mechanism, h, q, k, v), None)
    (out.square().sum() + state.sum()).backward()
    assert torch.isfinite(out).all() and torch.isfinite(state).all()
    assert all(torch.isfinite(p.grad).all() for p in mechanism.parameters())


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_bf16_backbone_keeps_gates_and_state_in_float32(name: str) -> None:
    mechanism = make(name)
    q, k, v, log_decay, beta = prepare(mechanism, *(x.bfloat16() for x in sequence(SHAPE, 20)))
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert all(x.dtype == torch.float32 for x in (log_decay, beta) if x is not None)
    out, state = mechanism.parallel(q, k, v, log_decay, beta, None)
    assert (out.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_masked_tokens_leave_the_state() -> None:
    for name in WITH_STATE:
        mechanism = make(name, random=True)
        q, *rest = prepare(mechanism, *sequence(SHAPE, 20))
        state = torch.randn_like(mechanism.init_state(2, "cpu"))
        zeroed = [None if x is None else torch.zeros_like(x) for x in rest]
        assert torch.equal(mechanism.parallel(q, *zeroed, state)[1], state), name
        assert torch.equal(mechanism.step(*cut((q, *zeroed), slice(0, 1)), state)[1], state), name


@pytest.mark.parametrize("name", WITH_STATE)
def test_update_writes_only_what_it_may(name: str) -> None:
    """With a state, unwritten tokens leave it bit for bit; without one, the first tokens' writes are withheld."""
    mechanism = make(name, random=True)
    h, q, k, v = sequence(SHAPE, 40)
    inputs = mechanism.gate_inputs(h)
    state = torch.randn_like(mechanism.init_state(2, "cpu"))
    nothing = torch.zeros(1, 40, dtype=torch.bool)
    assert torch.equal(mechanism.update(q, k, v, inputs, nothing, state)[1], state)
    late = torch.arange(40)[None] >= 10
    out, _ = mechanism.update(q, k, v, inputs, late, None)
    masked, _ = mechanism.update(q, k, v, inputs, late, torch.zeros_like(state))
    rest, _ = mechanism.update(q[:, 10:], k[:, 10:], v[:, 10:], inputs[:, 10:], late[:, 10:], None)
    torch.testing.assert_close(out, masked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[:, 10:], rest, rtol=1e-5, atol=1e-5)
    assert not out[:, :10].any()


def test_the_scalar_gate_costs_no_memory() -> None:
    mechanism = make("gdn_scalar")
    log_decay = prepare(mechanism, *sequence(SHAPE, 5))[3]
    assert log_decay.shape[-1] == SHAPE.head_dim and log_decay.stride(-1) == 0


def test_none_reads_nothing() -> None:
    mechanism = make("none")
    out, state = mechanism.parallel(*prepare(mechanism, *sequence(SHAPE, 5)), None)
    assert out.shape == (2, 5, 6, 16) and not out.any()
    assert state.numel() == 0 and mechanism.init_state(2, "cpu").shape == state.shape
    assert not list(mechanism.parameters())


def test_start_values() -> None:
    gdn = make("gdn")
    assert {n: tuple(p.shape) for n, p in gdn.named_parameters()} == {
        "gate.down.weight": (16, 48), "gate.up.weight": (96, 16), "gate.up.bias": (96,),
        "beta.weight": (6, 48), "beta.bias": (6,),
    }  # fmt: skip
    assert torch.equal(gdn.gate.up.bias, torch.ones(96)) and torch.equal(gdn.beta.bias, -torch.ones(6))
    assert gdn.gate.down.weight.abs().max() <= 48**-0.5 and gdn.gate.down.weight.std() > 0  # nn.Linear's default
    assert torch.equal(make("gla", gate_bias=3.0).gate.up.bias, torch.full((96,), 3.0))
    hedgehog = make("hedgehog")
    assert torch.equal(hedgehog.q_map.weight[3], torch.eye(16, 8)) and not hedgehog.k_map.bias.any()
    x = torch.randn(1, 2, 6, 16)
    half = x[..., :8]
    assert torch.equal(hedgehog.q_map(x), torch.cat((half.softmax(-1), (-half).softmax(-1)), dim=-1))
    assert all(p.dtype == torch.float32 and p.requires_grad for p in (*gdn.parameters(), *hedgehog.parameters()))


PUBLISHED = {  # recipe section 3: millions of new parameters without adaptation (gla; kgla and gdn)
    "llama3.1-8b": (4.33, 8.52), "qwen3-8b-base": (4.87, 9.59), "qwen3-0.6b-base": (1.43, 1.89),
    "qwen3-1.7b-base": (1.89, 2.81), "qwen3-4b-base": (3.98, 6.93), "qwen3-14b-base": (6.76, 14.95),
    "qwen3-32b": (14.16, 35.13),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_parameter_counts_are_the_published_ones(model: str) -> None:
    shape = REGISTRY[model].shape
    C, H, D, layers = shape.hidden, shape.heads, shape.head_dim, shape.layers
    counts = {}
    for name in WITH_STATE:
        with torch.device("meta"):
            mechanism = mechanism_class(name)(shape, Recipe(mechanism=name))
        counts[name] = sum(p.numel() for p in mechanism.parameters())
    gla, gdn = PUBLISHED[model]
    assert round(counts["gla"] * layers / 1e6, 2) == gla
    assert round(counts["kgla"] * layers / 1e6, 2) == round(counts["gdn"] * layers / 1e6, 2) == gdn
    assert counts["gdn_scalar"] == C * 16 + 16 * H + H + C * H + H
    assert counts["hedgehog"] == (H + shape.kv_heads) * (D + 1) * D // 2
    if model in ("llama3.1-8b", "qwen3-8b-base"):
        assert round(counts["hedgehog"] * layers / 1e6, 2) == {"llama3.1-8b": 10.57, "qwen3-8b-base": 11.89}[model]


def test_hedgehog_refuses_an_odd_head_dimension() -> None:
    with pytest.raises(ValueError, match="even head dimension, not 15"):
        make("hedgehog", dataclasses.replace(SHAPE, head_dim=15))
