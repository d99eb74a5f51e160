"""Window-and-sinks attention in three Triton kernels: forward, gradient of q and of the sinks, gradient of k and v.

Scores never lie in memory, query heads share their key/value head without a copy, and the work is L · (w + s). The
equations are those of ``linear_core.exact``, which decides when this form runs; CUDA only (and Triton's interpreter).

Shape letters: R rows, L queries, J = w − 1 + L keys, H query heads, G key/value heads, D head dimension, s sinks; in the
kernels M queries and N keys a tile, S the sinks filled to a power of two, NEAR the sinks that are there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALLEST_TILE = 16  # of a matrix product
TILE = {2: 64, 4: 32}  # queries and keys of a tile by bytes of an element: what shared memory holds at D = 128


@triton.jit
def _scores(q, k, scale, visible, PRECISION: tl.constexpr):
    """[M, N] scaled scores, −inf where not visible. q: [M, D], k: [N, D]."""
    return tl.where(visible, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))


@triton.jit
def _in_window(i, j, past, L, WINDOW: tl.constexpr):
    """[M, N] whether query i of this pass sees key j, which lies i + w − 1 − j tokens behind it."""
    behind = i[:, None] + (WINDOW - 1) - j[None, :]
    return (behind >= 0) & (behind < WINDOW) & (behind <= past + i[:, None]) & (i[:, None] >= 0) & (i[:, None] < L)


@triton.jit
def _sink_seen(i, past, L, S: tl.constexpr, NEAR: tl.constexpr, WINDOW: tl.constexpr):
    """[M, S] whether query i sees a sink here: once the window has left it behind."""
    sink = tl.arange(0, S)[None, :]
    return (sink <= past + i[:, None] - WINDOW) & (sink < NEAR) & (i[:, None] < L)


@triton.jit
def _forward(
    q, k, v, sink_k, sink_v, o, lse, past_of, q_r, q_t, q_h, k_r, k_t, k_h, v_r, v_t, v_h, scale, L, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, NEAR: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, HAS_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, row, head = tl.program_id(0) * M, (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    group = head // (H // G)
    past = tl.load(past_of + row).to(tl.int32) if HAS_PAST else 0
    i, d = start + tl.arange(0, M), tl.arange(0, WIDTH)
    inside, wide = i < L, d < D
    at_q = row * q_r + i[:, None].to(tl.int64) * q_t + head * q_h + d[None, :]
    queries = tl.load(q + at_q, mask=inside[:, None] & wide[None, :], other=0.0)
    largest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    read = tl.zeros([M, WIDTH], tl.float32)
    if NEAR > 0:
        sink = tl.arange(0, S)
        at_sink = ((row * NEAR + sink[:, None]) * G + group) * D + d[None, :]
        near = (sink[:, None] < NEAR) & wide[None, :]
        sink_keys = tl.load(sink_k + at_sink, mask=near, other=0.0)
        sink_scores = _scores(queries, sink_keys, scale, _sink_seen(i, past, L, S, NEAR, WINDOW), PRECISION)
        largest = tl.max(sink_scores, 1)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        sink_weights = tl.exp(sink_scores - base[:, None])
        total = tl.sum(sink_weights, 1)
        sink_values = tl.load(sink_v + at_sink, mask=near, other=0.0)
        read = tl.dot(sink_weights.to(sink_values.dtype), sink_values, input_precision=PRECISION)
    for tile in range(0, (M + WINDOW - 2) // N + 1):
        j = start + tile * N + tl.arange(0, N)
        there = (j[:, None] < L + WINDOW - 1) & wide[None, :]
        at = row * k_r + j[:, None].to(tl.int64) * k_t + group * k_h + d[None, :]
        keys = tl.load(k + at, mask=there, other=0.0)
        scores = _scores(queries, keys, scale, _in_window(i, j, past, L, WINDOW), PRECISION)
        now = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        faded = tl.exp(largest - base)
        weights = tl.exp(scores - base[:, None])
        total = total * faded + tl.sum(weights, 1)
        at = row * v_r + j[:, None].to(tl.int64) * v_t + group * v_h + d[None, :]
        values = tl.load(v + at, mask=there, other=0.0)
        read = tl.dot(weights.to(values.dtype), values, read * faded[:, None], input_precision=PRECISION)
        largest = now
    at = (row * L + i.to(tl.int64)) * H + head
    tl.store(lse + at, largest + tl.log(total), mask=inside)
    tl.store(o + at[:, None] * D + d[None, :], read / total[:, None], mask=inside[:, None] & wide[None, :])


@triton.jit
def _backward_q(
    q, k, v, sink_k, sink_v, o, lse, grad_o, grad_lse, grad_q, delta, grad_sink_k, grad_sink_v, past_of,
    q_r, q_t, q_h, k_r, k_t, k_h, v_r, v_t, v_h, scale, L, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, NEAR: tl.constexpr, S: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, HAS_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, row, head = tl.program_id(0) * M, (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    group = head // (H // G)
    past = tl.load(past_of + row).to(tl.int32) if HAS_PAST else 0
    i, d = start + tl.arange(0, M), tl.arange(0, WIDTH)
    inside, wide = i < L, d < D
    real = inside[:, None] & wide[None, :]
    at_q = row * q_r + i[:, None].to(tl.int64) * q_t + head * q_h + d[None, :]
    queries = tl.load(q + at_q, mask=real, other=0.0)
    at = (row * L + i.to(tl.int64)) * H + head
    at_o = at[:, None] * D + d[None, :]
    upstream = tl.load(grad_o + at_o, mask=real, other=0.0)
    out = tl.load(o + at_o, mask=real, other=0.0)
    log_total = tl.load(lse + at, mask=inside, other=0.0)
    own = tl.sum(out.to(tl.float32) * upstream.to(tl.float32), 1) - tl.load(grad_lse + at, mask=inside, other=0.0)
    tl.store(delta + at, own, mask=inside)
    found = tl.zeros([M, WIDTH], tl.float32)
    if NEAR > 0:
        sink = tl.arange(0, S)
        at_sink = ((row * NEAR + sink[:, None]) * G + group) * D + d[None, :]
        near = (sink[:, None] < NEAR) & wide[None, :]
        sink_keys = tl.load(sink_k + at_sink, mask=near, other=0.0)
        sink_values = tl.load(sink_v + at_sink, mask=near, other=0.0)
        sink_scores = _scores(queries, sink_keys, scale, _sink_seen(i, past, L, S, NEAR, WINDOW), PRECISION)
        sink_weights = tl.exp(sink_scores - log_total[:, None])
        by_sink_weight = tl.dot(upstream, tl.trans(sink_values), input_precision=PRECISION) - own[:, None]
        by_sink_score = (sink_weights * by_sink_weight * scale).to(sink_keys.dtype)
        found = tl.dot(by_sink_score, sink_keys, input_precision=PRECISION)
        at_part = ((((row * tl.num_programs(0) + tl.program_id(0)) * H + head) * NEAR) + sink[:, None]) * D + d[None, :]
        by_k = tl.dot(tl.trans(by_sink_score), queries, input_precision=PRECISION)
        by_v = tl.dot(tl.trans(sink_weights.to(upstream.dtype)), upstream, input_precision=PRECISION)
        tl.store(grad_sink_k + at_part, by_k, mask=near)
        tl.store(grad_sink_v + at_part, by_v, mask=near)
    for tile in range(0, (M + WINDOW - 2) // N + 1):
        j = start + tile * N + tl.arange(0, N)
        there = (j[:, None] < L + WINDOW - 1) & wide[None, :]
        keys = tl.load(k + row * k_r + j[:, None].to(tl.int64) * k_t + group * k_h + d[None, :], mask=there, other=0.0)
        values = tl.load(
            v + row * v_r + j[:, None].to(tl.int64) * v_t + group * v_h + d[None, :], mask=there, other=0.0
        )
        scores = _scores(queries, keys, scale, _in_window(i, j, past, L, WINDOW), PRECISION)
        weights = tl.exp(scores - log_total[:, None])
        by_weight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION) - own[:, None]
        by_score = (weights * by_weight * scale).to(keys.dtype)
        found = tl.dot(by_score, keys, found, input_precision=PRECISION)
    tl.store(grad_q + at_o, found, mask=real)


@triton.jit
def _backward_kv(
    q, k, v, lse, grad_o, delta, grad_k, grad_v, past_of, q_r, q_t, q_h, k_r, k_t, k_h, v_r, v_t, v_h, scale, L, H, G,
    D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    HAS_PAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, row, group = tl.program_id(0) * N, (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    past = tl.load(past_of + row).to(tl.int32) if HAS_PAST else 0
    j, d = start + tl.arange(0, N), tl.arange(0, WIDTH)
    wide = d < D
    there = (j[:, None] < L + WINDOW - 1) & wide[None, :]
    keys = tl.load(k + row * k_r + j[:, None].to(tl.int64) * k_t + group * k_h + d[None, :], mask=there, other=0.0)
    values = tl.load(v + row * v_r + j[:, None].to(tl.int64) * v_t + group * v_h + d[None, :], mask=there, other=0.0)
    by_k = tl.zeros([N, WIDTH], tl.float32)
    by_v = tl.zeros([N, WIDTH], tl.float32)
    tiles = (N + WINDOW - 2) // M + 1  # query i sees key j for j − w < i ≤ j
    for step in range(0, tiles * (H // G)):
        head = group * (H // G) + step // tiles
        i = start - (WINDOW - 1) + (step % tiles) * M + tl.arange(0, M)
        inside = (i >= 0) & (i < L)
        real = inside[:, None] & wide[None, :]
        queries = tl.load(q + row * q_r + i[:, None].to(tl.int64) * q_t + head * q_h + d[None, :], mask=real, other=0.0)
        at = (row * L + i.to(tl.int64)) * H + head
        upstream = tl.load(grad_o + at[:, None] * D + d[None, :], mask=real, other=0.0)
        log_total = tl.load(lse + at, mask=inside, other=0.0)
        own = tl.load(delta + at, mask=inside, other=0.0)
        scores = _scores(queries, keys, scale, _in_window(i, j, past, L, WINDOW), PRECISION)
        weights = tl.exp(scores - log_total[:, None])
        by_v = tl.dot(tl.trans(weights.to(upstream.dtype)), upstream, by_v, input_precision=PRECISION)
        by_weight = tl.dot(upstream, tl.trans(values), input_precision=PRECISION) - own[:, None]
        by_score = (weights * by_weight * scale).to(queries.dtype)
        by_k = tl.dot(tl.trans(by_score), queries, by_k, input_precision=PRECISION)
    at_k = ((row * (L + WINDOW - 1) + j[:, None].to(tl.int64)) * G + group) * D + d[None, :]
    tl.store(grad_k + at_k, by_k, mask=there)
    tl.store(grad_v + at_k, by_v, mask=there)


@torch.library.custom_op("golinear::windowed_attention", mutates_args=())
def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, window: int, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As ``linear_core.exact.exact_attention``: q [R, L, H, D], k, v [R, w − 1 + L, G, D], sink_k, sink_v [R, s, G, D],
    past [R] or None → (o [R, L, H, D], log-sum-exp [R, L, H] float32). Differentiable in all but past."""
    q, k, v, sink_k, sink_v = _arranged(q, k, v, sink_k, sink_v)
    rows, length, heads, dim = q.shape
    o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)
    grid = (triton.cdiv(length, _tile(q)), rows * heads)
    _forward[grid](
        q, k, v, sink_k, sink_v, o, lse, _or(past, q), *_strides(q, k, v), dim**-0.5, length, heads, k.shape[2],
        NEAR=sink_k.shape[1], S=_power(sink_k.shape[1]), num_warps=4, num_stages=2, **_constants(q, window, past),
    )  # fmt: skip
    return o, lse


@windowed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, window: int, past: Tensor | None) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("golinear::windowed_attention_backward", mutates_args=())
def _windowed_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor,
    grad_lse: Tensor, window: int, past: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, sink_k, sink_v, each in its tensor's shape and type."""
    q, k, v, sink_k, sink_v = _arranged(q, k, v, sink_k, sink_v)
    grad_o, grad_lse = grad_o.contiguous(), grad_lse.contiguous()
    rows, length, heads, dim = q.shape
    groups, sinks = k.shape[2], sink_k.shape[1]
    blocks = triton.cdiv(length, _tile(q))
    grad_q, delta = q.new_empty(q.shape), torch.empty_like(lse)
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    parts = q.new_empty(2, rows, blocks, heads, sinks, dim, dtype=torch.float32)
    common = _constants(q, window, past)
    sizes = (*_strides(q, k, v), dim**-0.5, length, heads, groups)
    _backward_q[(blocks, rows * heads)](
        q, k, v, sink_k, sink_v, o, lse, grad_o, grad_lse, grad_q, delta, parts[0], parts[1], _or(past, q), *sizes,
        NEAR=sinks, S=_power(sinks), num_warps=4, num_stages=2, **common,
    )  # fmt: skip
    _backward_kv[(triton.cdiv(k.shape[1], _tile(q)), rows * groups)](
        q, k, v, lse, grad_o, delta, grad_k, grad_v, _or(past, q), *sizes, num_warps=4, num_stages=2, **common
    )
    parts = parts.unflatten(3, (groups, heads // groups))
    by_k, by_v = (part.sum((1, 3)).transpose(1, 2).to(sink_k.dtype).contiguous() for part in parts)
    return grad_q, grad_k, grad_v, by_k, by_v


@_windowed_attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, o: Tensor, lse: Tensor, grad_o: Tensor,
    grad_lse: Tensor, window: int, past: Tensor | None,
) -> Any:  # fmt: skip
    return tuple(x.new_empty(x.shape) for x in (q, k, v, sink_k, sink_v))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.window, past = inputs
    ctx.save_for_backward(*tensors, *output, *([] if past is None else [past]))


def _gradients(ctx: Any, grad_o: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, o, lse = ctx.saved_tensors[:7]
    past = ctx.saved_tensors[7] if len(ctx.saved_tensors) > 7 else None
    gradients = _windowed_attention_backward(*tensors, o, lse, grad_o, grad_lse, ctx.window, past)
    return (*gradients, None, None)


windowed_attention.register_autograd(_gradients, setup_context=_keep)


def _arranged(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k, v with D laid out densely, the sinks wholly so."""
    q, k, v, *sinks = tensors
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return (*dense, *(x.contiguous() for x in sinks))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(n for x in tensors for n in x.stride()[:3])


def _or(past: Tensor | None, other: Tensor) -> Tensor:
    return other if past is None else past


def _tile(q: Tensor) -> int:
    return TILE[q.element_size()] if q.shape[-1] <= 128 else TILE[q.element_size()] // 2


def _power(sinks: int) -> int:
    return max(SMALLEST_TILE, triton.next_power_of_2(sinks))


def _constants(q: Tensor, window: int, past: Tensor | None) -> dict[str, Any]:
    dim = q.shape[-1]
    return {
        "D": dim, "WIDTH": max(SMALLEST_TILE, triton.next_power_of_2(dim)), "WINDOW": window, "M": _tile(q), "N": _tile(q),
        "HAS_PAST": past is not None, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
