"""The exact path: softmax attention over ``w`` latest tokens and ``s`` sinks, at a cost that grows linearly with T.

On CUDA several tokens go through the Triton kernels of ``linear_core.kernels.windowed``; anything else in blocks:
queries meet the keys of their window and the sinks in two batched matrix products. results/first-runs-h200.md compares
the two with FlexAttention and full attention.

Shape letters: R sequences, L tokens of this pass, H query heads, G key/value heads, D head dimension, b block.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

# Queries a block. Each block meets b + w − 1 keys and copies them once: b = w reads every key twice; below 64 the
# matrix units idle.
SMALLEST_BLOCK = 64


def _kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The Triton form, where there is a GPU. By name: a model folder made by export carries the blocks alone."""
    try:
        return import_module("linear_core.kernels.windowed").windowed_attention if torch.cuda.is_available() else None
    except ImportError:
        return None


KERNEL = _kernel()


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, *, window: int, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention with scale 1/√D over ``({1..s} ∪ {t−w+1..t}) ∩ {1..t}`` (recipe section 2, step 2).

    q: [R, L, H, D]. k, v: [R, w − 1 + L, G, D], the w − 1 tokens before this pass first (anything where there are
    none). sink_k, sink_v: [R, s, G, D] the first s tokens of each sequence, as far as they have been seen.
    past: [R] tokens before this pass (None: 0). Returns (o [R, L, H, D] in q's type, log-sum-exp [R, L, H] float32).
    """
    if KERNEL is not None and q.is_cuda and q.shape[1] > 1:
        return KERNEL(q, k, v, sink_k, sink_v, window, past)
    return in_blocks(q, k, v, sink_k, sink_v, window=window, past=past)


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, *, window: int, past: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``exact_attention`` in PyTorch alone: for the CPU, for one query, and to compare with."""
    rows, length, heads, dim = q.shape
    groups, sinks = k.shape[2], sink_k.shape[1]
    block = min(max(SMALLEST_BLOCK, window), length)
    num_blocks = -(-length // block)
    pad = num_blocks * block - length
    q_blocks = functional.pad(q, (0, 0, 0, 0, 0, pad)).view(rows, num_blocks, block, groups, heads // groups, dim)
    q_blocks = q_blocks.permute(0, 1, 3, 4, 2, 5).flatten(3, 4) * dim**-0.5  # [R, N, G, H/G·b, D]
    span = block + window - 1
    k_blocks = functional.pad(k, (0, 0, 0, 0, 0, pad)).unfold(1, span, block)  # [R, N, G, D, span]
    v_blocks = functional.pad(v, (0, 0, 0, 0, 0, pad)).unfold(1, span, block).transpose(-1, -2)
    scores = torch.matmul(q_blocks, k_blocks)
    seen = _window_mask(num_blocks, block, window, past, q.device)
    if sinks:
        scores = torch.cat([torch.matmul(q_blocks, sink_k.permute(0, 2, 3, 1)[:, None]), scores], dim=-1)
        seen = torch.cat([_sink_mask(num_blocks, block, window, sinks, past, q.device), seen], dim=-1)
    shape = (rows, num_blocks, groups, heads // groups, block, sinks + span)
    scores = scores.float().view(shape).masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().to(v.dtype).flatten(3, 4)
    o = torch.matmul(weights[..., sinks:], v_blocks)
    if sinks:
        o = o + torch.matmul(weights[..., :sinks], sink_v.transpose(1, 2)[:, None])
    o = o.view(rows, num_blocks, groups, heads // groups, block, dim).permute(0, 1, 4, 2, 3, 5)
    lse = lse.squeeze(-1).permute(0, 1, 4, 2, 3)
    return o.reshape(rows, -1, heads, dim)[:, :length], lse.reshape(rows, -1, heads)[:, :length]


def _positions(num_blocks: int, block: int, past: Tensor | None, device: torch.device) -> Tensor:
    """[R or 1, N, 1, 1, b, 1] position of each query."""
    own = torch.arange(num_blocks * block, device=device).view(1, num_blocks, 1, 1, block, 1)
    return own if past is None else own + past.view(-1, 1, 1, 1, 1, 1)


def _window_mask(num_blocks: int, block: int, window: int, past: Tensor | None, device: torch.device) -> Tensor:
    """[R or 1, N, 1, 1, b, span]: key j of a block is w − 1 − j + i tokens behind query i."""
    i = torch.arange(block, device=device)[:, None]
    behind = i + window - 1 - torch.arange(block + window - 1, device=device)
    t = _positions(num_blocks, block, past, device)
    return (behind >= 0) & (behind < window) & (behind <= t)


def _sink_mask(
    num_blocks: int, block: int, window: int, sinks: int, past: Tensor | None, device: torch.device
) -> Tensor:
    """[R or 1, N, 1, 1, b, s]: a sink is read here once the window has left it behind."""
    return torch.arange(sinks, device=device) <= _positions(num_blocks, block, past, device) - window


def exact_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """The same from its definition, one masked L × L softmax. q: [R, L, H, D], k, v: [R, L, G, D]; no past. For tests."""
    length, heads, dim = q.shape[1:]
    repeats = heads // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    t = torch.arange(length, device=q.device)
    behind = t[:, None] - t
    seen = (behind >= 0) & ((behind < window) | (t < sinks))
    scores = torch.einsum("rthd,rihd->rhti", q.float(), k.float()) * dim**-0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    o = torch.einsum("rhti,rihd->rthd", scores.softmax(-1), v.float())
    return o.to(q.dtype), scores.logsumexp(-1).transpose(1, 2)
