"""What a recipe adds to a base model and what its cache costs, without weights (recipe section 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

from linear_core.models import Shape
from linear_core.recipe import Recipe

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CACHE_BYTES_PER_NUMBER = 2  # bfloat16 keys and values; states and gate inputs are float32


def inspect_recipe(shape: Shape, recipe: Recipe) -> dict[str, Any]:
    """Counts and bytes of one sequence: layers, new_parameters, cache_bytes (of the fixed part), state_bytes,
    full_attention_bytes_per_token, break_even_tokens (where a full cache is as large), and both by length.
    """
    import torch

    from linear_core.convert import convert, new_parameters, softmax_layers
    from linear_core.models import build

    # which layers are the hardest is measured; how many is known
    as_many = dataclasses.replace(recipe, softmax_layers=recipe.softmax_layers.replace("hardest", "uniform"))
    kept = len(softmax_layers(as_many, shape.layers))
    linear = shape.layers - kept
    per_token = 2 * shape.kv_heads * shape.head_dim * CACHE_BYTES_PER_NUMBER
    fixed = count = state = 0
    if linear:
        one_layer = dataclasses.replace(shape, layers=1, vocab=8)
        model = convert(build(one_layer, dtype=torch.bfloat16), dataclasses.replace(recipe, softmax_layers="none"))
        tensors = model.new_cache(1).layers[0].tensors()
        fixed = linear * sum(t.numel() * t.element_size() for t in tensors.values())
        state = linear * (tensors["state"].numel() * 4 if "state" in tensors else 0)
        count = linear * sum(p.numel() for p in new_parameters(model).values())
    return {
        "recipe": recipe.to_dict(),
        "name": recipe.name,
        "layers": shape.layers,
        "linearized_layers": linear,
        "base_parameters": shape.num_parameters,
        "new_parameters": count,
        "cache_bytes": fixed,
        "state_bytes": state,
        "full_attention_bytes_per_token": shape.layers * per_token,
        "break_even_tokens": -(-fixed // (linear * per_token)) if linear else 0,
        "state_is_worth_tokens": state // (linear * per_token) if linear else 0,
        "by_length": [
            {
                "length": n,
                "cache_bytes": fixed + kept * per_token * n,
                "full_attention_bytes": shape.layers * per_token * n,
            }
            for n in LENGTHS
        ],
    }
