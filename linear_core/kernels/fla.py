"""The Triton kernels of flash-linear-attention 0.6 behind our two state updates. CUDA only; imported when first used.

Shapes and equations are those of ``linear_core.kernels.ops``. The kernels want q, k, v of one dtype, gates and state in
float32, an explicit scale, and q, k, log_decay of one shape: their grouped form shares q and k among value heads, which
is not GQA. ``gdn_scalar`` comes with its gate expanded over channels: the scalar-gate backward refuses to run on Hopper
with triton before 3.7.1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch.nn.functional as F
from torch import Tensor

MAX_KEY_SIZE = 256
# e^-88 is below float32's smallest normal number, so this floor changes no result. It keeps precision: the kernels
# subtract running sums of log decays, and sums near -1e6 are only exact to 0.06.
LOWEST_LOG_DECAY = -88.0


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``chunk_gla``, or ``chunk_simple_gla`` without decay. V is filled to a multiple of 16 (hedgehog's is D + 1)."""
    _need_cuda(q)
    size = v.shape[-1]
    if fill := -size % 16:
        v = F.pad(v, (0, fill))
        state = None if state is None else F.pad(state, (0, fill))
    q, k, state = q.to(v.dtype), k.to(v.dtype), None if state is None else state.float()
    if log_decay is None:
        out, end = _kernel("simple_gla", "chunk_simple_gla")(
            q, k, v, scale=scale, initial_state=state, output_final_state=True
        )
    else:
        decay = log_decay.float().clamp(min=LOWEST_LOG_DECAY)
        out, end = _kernel("gla", "chunk_gla")(
            q, k, v, decay, scale=scale, initial_state=state, output_final_state=True
        )
    return (out[..., :size], end[..., :size]) if fill else (out, end)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``chunk_kda``. Raises ValueError for K > 256, which its kernels cannot hold."""
    _need_cuda(q)
    if q.shape[-1] > MAX_KEY_SIZE:
        raise ValueError(
            f"the delta-rule kernel needs K ≤ {MAX_KEY_SIZE}, not {q.shape[-1]} (q {list(q.shape)}); use chunked"
        )
    return _kernel("kda", "chunk_kda")(
        q.to(v.dtype), k.to(v.dtype), v, log_decay.float().clamp(min=LOWEST_LOG_DECAY), beta.float(), scale=scale,
        initial_state=None if state is None else state.float(), output_final_state=True,
    )  # fmt: skip


@cache
def _kernel(module: str, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """A kernel by name: an import statement would make fla a requirement of exported model folders."""
    return getattr(import_module(f"fla.ops.{module}"), name)


def _need_cuda(q: Tensor) -> None:
    if not q.is_cuda:
        raise ValueError(f"implementation 'fla' needs CUDA tensors, not {q.device.type}; use 'chunked'")
