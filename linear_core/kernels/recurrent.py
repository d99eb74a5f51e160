"""One token in one Triton kernel: the state is read and written once. CUDA only, without gradients.

Shapes and equations are those of ``linear_core.kernels.ops`` with T = 1 (the kernels take more, one after the other).
"""

from __future__ import annotations

from torch import Tensor

from linear_core.kernels.fla import kernel, need_cuda, to_float


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``fused_recurrent_gla``, with or without decay."""
    need_cuda(q)
    out, end = kernel("gla", "fused_recurrent_gla")(
        q, k, v, log_decay, scale=scale, initial_state=to_float(state), output_final_state=True
    )
    return out.to(v.dtype), end


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """``fused_recurrent_kda``."""
    need_cuda(q)
    return kernel("kda", "fused_recurrent_kda")(
        q, k, v, log_decay, beta, scale=scale, initial_state=to_float(state), output_final_state=True
    )
