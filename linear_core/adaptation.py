"""What may move the linear path's q, k and v (recipe section 4): a short convolution of its own, or LoRA on the projections."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from linear_core.models import Shape


class ShortConvolution(nn.Module):
    """Depthwise causal convolution with bias and no activation, started at the identity.

    The paper does not say where it starts; last tap 1, the rest and the bias 0 changes nothing before training.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, kernel))
        self.bias = nn.Parameter(torch.zeros(channels))
        with torch.no_grad():
            self.weight[:, -1] = 1

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, kernel − 1 + L, heads, D], the kernel − 1 entries before the first output in front → [R, L, heads, D]."""
        rows, _, heads, dim = x.shape
        flat = x.flatten(2).transpose(1, 2)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        y = functional.conv1d(flat, weight[:, None], bias, groups=weight.shape[0])
        return y.transpose(1, 2).reshape(rows, -1, heads, dim)


class Convolutions(nn.Module):
    """The three convolutions of a layer, on kv heads for k and v (before they are repeated)."""

    def __init__(self, shape: Shape, kernel: int) -> None:
        super().__init__()
        self.q = ShortConvolution(shape.heads * shape.head_dim, kernel)
        self.k = ShortConvolution(shape.kv_heads * shape.head_dim, kernel)
        self.v = ShortConvolution(shape.kv_heads * shape.head_dim, kernel)


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def add_lora(model: nn.Module, layers: Iterable[int], rank: int, alpha: int) -> None:
    """LoRA (peft) on q, k, v and o of these layers, in place; new parameters float32, the rest stays frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("adaptation lora needs the package peft") from error
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", target_modules=list(LORA_TARGETS),
        layers_to_transform=sorted(layers), layers_pattern="layers",
    )  # fmt: skip
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()


def remove_lora(attention: nn.Module, *, merge: bool = False) -> None:
    """Take LoRA off one attention module; with ``merge`` its effect stays in the projections' weights."""
    for target in LORA_TARGETS:
        layer = getattr(attention, target)
        if hasattr(layer, "base_layer"):
            if merge:
                layer.merge()
            setattr(attention, target, layer.base_layer)


def set_lora(attention: nn.Module, enabled: bool) -> None:
    """Switch LoRA on or off where there is one."""
    for target in LORA_TARGETS:
        layer = getattr(attention, target)
        if hasattr(layer, "enable_adapters"):
            layer.enable_adapters(enabled)
            for parameter in (*layer.lora_A.parameters(), *layer.lora_B.parameters()):
                parameter.requires_grad_(True)
