"""docs/add-a-mechanism.md works as written: its file and its line make a mechanism that everything else takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from linear_core.mechanisms import MECHANISMS, mechanism_class, register
from linear_core.models import Shape
from linear_core.recipe import Recipe

GUIDE = Path(__file__).parents[2] / "docs" / "add-a-mechanism.md"
SHAPE = Shape(
    family="llama", hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=64, tied=True,
    max_positions=256, rope_theta=1e4, rms_eps=1e-5,
)  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The guide's first Python block as a module of another package, registered as the guide says."""
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "toy_retention.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    register("retention", "toy_retention:Retention")
    yield "retention"
    del MECHANISMS["retention"]


def test_the_guide_makes_a_working_mechanism(toy: str) -> None:
    recipe = Recipe(mechanism=toy)
    assert recipe.name == "retention 56+8"
    mechanism = mechanism_class(toy)(SHAPE, recipe)
    q, k, v = (torch.randn(1, 70, heads, 16) for heads in (4, 2, 2))
    q, k = mechanism.features(q, k)
    v = mechanism.values(v)
    log_decay, beta = mechanism.gates(mechanism.gate_inputs(torch.randn(1, 70, 32)), k)
    whole, end = mechanism.parallel(q, k, v, log_decay, beta, None)
    state, reads = mechanism.init_state(1, "cpu"), []
    for t in range(70):
        read, state = mechanism.step(*(x[:, t : t + 1] for x in (q, k, v, log_decay)), None, state)
        reads.append(read)
    torch.testing.assert_close(torch.cat(reads, dim=1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, end, rtol=1e-5, atol=1e-5)
    whole.sum().backward()
    assert mechanism.decay.grad.abs().sum() > 0


def test_a_name_is_taken_once(toy: str) -> None:
    register(toy, "toy_retention:Retention")  # the same again is fine
    with pytest.raises(ValueError, match="'gla' is taken"):
        register("gla", "toy_retention:Retention")
    with pytest.raises(ValueError, match="'softmax' has no class; allowed: none, hedgehog"):
        mechanism_class("softmax")
