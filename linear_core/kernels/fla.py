"""The Triton kernels of flash-linear-attention 0.6 behind our two state updates. CUDA only; imported when first used.

Shapes and equations are those of ``linear_core.kernels.ops``. The kernels want q, k, v of one dtype, gates and state in
float32, an explicit scale, and q, k, log_decay of one shape: their grouped form shares q and k among value heads, which
is not GQA. ``gdn_scalar`` comes with its gate expanded over channels: the scalar-gate backward refuses to run on Hopper
with triton before 3.7.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_core.kernels.tuned import fla_module

MAX_KEY_SIZE = 256
# The forward pass keeps what the backward pass would make again (7 × q's bytes a layer: 235 MB at 4096 tokens, H = 32,
# D = 128) as long as 32 layers of it take no more than this share of the card's memory.
KEPT_SHARE = 1 / 4


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``chunk_gla``, or ``chunk_simple_gla`` without decay. V is filled to a multiple of 16 (hedgehog's is D + 1)."""
    need_cuda(q)
    size = v.shape[-1]
    if fill := -size % 16:
        v = F.pad(v, (0, fill))
        state = None if state is None else F.pad(state, (0, fill))
    common = {"scale": scale, "initial_state": to_float(state), "output_final_state": True}
    q, k = q.to(v.dtype), k.to(v.dtype)
    if log_decay is None:
        out, end = run_kernel("simple_gla", "chunk_simple_gla", q, k, v, **common)
    else:
        out, end = run_kernel("gla", "chunk_gla", q, k, v, log_decay.float(), **common)
    return (out[..., :size], end[..., :size]) if fill else (out, end)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``chunk_kda``. Raises ValueError for K > 256, which its kernels cannot hold."""
    return _chunk_kda(q, k, v, log_decay.float(), beta, state, scale)


def low_rank_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same with log_decay = logsigmoid(inputs Wᵀ + b) finished inside the kernel.

    The kernel's own gate is −exp(A) · softplus(g + bias), and logsigmoid(x) = −softplus(−x): A = 0, the rest negated.
    One gate a head is widened in W, not in its products.
    """
    heads, size = q.shape[2:]
    if weight.shape[0] == heads:
        weight, bias = weight.repeat_interleave(size, dim=0), bias.repeat_interleave(size)
    raw = F.linear(inputs, -weight).unflatten(-1, (heads, size))
    gate = {"use_gate_in_kernel": True, "A_log": bias.new_zeros(heads), "dt_bias": -bias}
    return _chunk_kda(q, k, v, raw, beta, state, scale, **gate)


def _chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor | None, scale: float, **options: Any
) -> tuple[Tensor, Tensor]:
    need_cuda(q)
    if q.shape[-1] > MAX_KEY_SIZE:
        raise ValueError(
            f"the delta-rule kernel needs K ≤ {MAX_KEY_SIZE}, not {q.shape[-1]} (q {list(q.shape)}); use chunked"
        )
    keep = 7 * 32 * q.numel() * v.element_size() <= KEPT_SHARE * card_memory(q.device.index)
    return run_kernel(
        "kda", "chunk_kda", q.to(v.dtype), k.to(v.dtype), v, gate, beta.float(), scale=scale,
        initial_state=to_float(state), output_final_state=True, disable_recompute=keep, **options,
    )  # fmt: skip


@torch.compiler.disable
def run_kernel(module: str, name: str, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Call a kernel by name. A compiler that looked in here would compile fla's own import."""
    return kernel(module, name)(*arguments, **named)


@cache
def kernel(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel by name."""
    return getattr(fla_module(f"ops.{module}"), name)


@cache
def card_memory(index: int) -> int:
    """Bytes of a card's memory."""
    return torch.cuda.get_device_properties(index).total_memory


def need_cuda(q: Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"implementation 'fla' needs CUDA tensors, not {q.device.type}; use 'chunked'")


def to_float(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.float()
