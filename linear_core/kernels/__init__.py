"""The two state updates behind every mechanism, each in forms that agree.

    from linear_core.kernels import gated_delta_rule, gated_linear_attention, l2_normalise

``reference`` is the slow token loop that defines the result, ``chunked`` plain PyTorch for any device, ``step`` one
token, ``fla`` the Triton kernels of flash-linear-attention and ``recurrent`` theirs for one token. Layout [B, T, H, ·];
the state is float32 [B, H, K, V].
"""

from linear_core.kernels.norm import l2_normalise
from linear_core.kernels.ops import (
    IMPLEMENTATIONS,
    forced,
    gated_delta_rule,
    gated_linear_attention,
    low_rank_delta_rule,
)

__all__ = [
    "IMPLEMENTATIONS",
    "forced",
    "gated_delta_rule",
    "gated_linear_attention",
    "l2_normalise",
    "low_rank_delta_rule",
]
