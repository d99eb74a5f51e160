"""The Triton kernels of the exact path against the blocks in PyTorch, on a CUDA device: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from linear_core.exact import in_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim"), [(9, 3, 64), (32, 8, 128), (4, 4, 80)])
@pytest.mark.parametrize(("window", "sinks"), [(56, 8), (64, 0), (5, 2), (300, 4)])
def test_kernels_are_the_blocks(window: int, sinks: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> None:
    from linear_core.kernels.windowed import windowed_attention

    rows, length = 2, 333
    past = None if window != 5 else torch.tensor([0, 17], device="cuda")
    shapes = [(length, heads), (window - 1 + length, groups), (window - 1 + length, groups), (sinks, groups)]
    shapes.append(shapes[-1])
    inputs = [torch.randn(rows, *s, dim, device="cuda", dtype=dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted, got = in_blocks(*exact, window=window, past=past), windowed_attention(*inputs, window, past)
    upstream = [torch.randn_like(x) for x in got]
    tensors = 5 if sinks else 3
    pairs = list(zip(wanted, got))
    of_wanted = torch.autograd.grad(wanted, exact[:tensors], [u.to(w.dtype) for u, w in zip(upstream, wanted)])
    pairs += zip(of_wanted, torch.autograd.grad(got, inputs[:tensors], upstream))
    for index, (a, b) in enumerate(pairs):
        error = ((a - b).norm() / a.norm()).item()
        assert error <= TOLERANCE[dtype], f"tensor {index} is off by {error:.1e}"
