"""Tiny random models of both families, with everything that sets the families apart."""

import dataclasses

import torch

from linear_core.convert import convert, new_parameters
from linear_core.models import LLAMA_31_ROPE, Shape, build
from linear_core.recipe import Recipe

LLAMA = Shape(
    family="llama", hidden=48, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=64, vocab=97, tied=False,
    max_positions=4096, rope_theta=1e4, rms_eps=1e-5, rope_scaling=(*LLAMA_31_ROPE[:-1], ("original_max_position_embeddings", 64)),
)  # fmt: skip
# like Qwen3-0.6B: head_dim ≠ hidden / heads, q/k norm, tied embeddings
QWEN3 = Shape(
    family="qwen3", hidden=40, layers=2, heads=4, kv_heads=1, head_dim=16, intermediate=64, vocab=97, tied=True,
    max_positions=4096, rope_theta=1e6, rms_eps=1e-6,
)  # fmt: skip
SHAPES = {"llama": LLAMA, "qwen3": QWEN3}


def base(family: str = "llama", seed: int = 0, **changes: object) -> torch.nn.Module:
    """A frozen random model; its weights are large enough that attention matters."""
    model = build(dataclasses.replace(SHAPES[family], **changes), device="cpu", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            elif "embed" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = None  # a random model would stop anywhere
    return model


def randomised(model: torch.nn.Module, std: float = 0.5, seed: int = 1) -> torch.nn.Module:
    """New parameters drawn anew: identity convolutions and zero starts would hide delay, tail and order faults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in new_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def linearized(recipe: str | Recipe, family: str = "llama", **changes: object) -> torch.nn.Module:
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    return randomised(convert(base(family, **changes), recipe))


def tokens(length: int, batch: int = 1, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
