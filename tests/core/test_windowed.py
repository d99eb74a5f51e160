"""The Triton kernels of the exact path, run by Triton's interpreter on the CPU, against the blocks in PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPARE = """
import torch
from linear_core.exact import in_blocks
from linear_core.kernels.windowed import windowed_attention

CASES = [  # rows, tokens, query heads, key/value heads, head dimension, window, sinks, tokens before this pass
    (2, 100, 4, 2, 16, 5, 3, None), (1, 130, 3, 1, 32, 56, 8, None), (2, 70, 4, 4, 20, 64, 0, None),
    (1, 40, 2, 1, 16, 1, 0, None), (2, 50, 4, 2, 16, 7, 2, [3, 20]), (1, 150, 2, 1, 16, 100, 4, None),
]
torch.manual_seed(0)
for rows, length, heads, groups, dim, window, sinks, past in CASES:
    shapes = [(length, heads), (window - 1 + length, groups), (window - 1 + length, groups), (sinks, groups), (sinks, groups)]
    inputs = [torch.randn(rows, *shape, dim).requires_grad_() for shape in shapes]
    past = None if past is None else torch.tensor(past)
    wanted, got = in_blocks(*inputs, window=window, past=past), windowed_attention(*inputs, window, past)
    upstream = [torch.randn_like(x) for x in wanted]
    pairs = [*zip(wanted, got)]
    if not sinks:
        inputs = inputs[:3]
    pairs += zip(*(torch.autograd.grad(outputs, inputs, upstream) for outputs in (wanted, got)))
    for i, (a, b) in enumerate(pairs):
        error = ((a - b).norm() / a.norm().clamp_min(1e-9)).item() if a.abs().max() > 1e-6 else b.abs().max().item()
        assert error < 2e-6, f"window {window}, sinks {sinks}: tensor {i} is off by {error:.1e}"
print("equal")
"""


def test_the_kernels_are_the_blocks():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
