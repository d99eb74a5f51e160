"""Base model + Recipe → linearized model, in place and without a second copy of any weight.

Conversion changes the class of each attention module to one that has ``LinearizedAttention`` in front, and the class
of the model to one that makes the layout and the cache. ``unconvert`` undoes it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from linear_core.adaptation import add_lora, remove_lora, set_lora
from linear_core.attention import LinearizedAttention
from linear_core.cache import LinearizedCache
from linear_core.layout import make_layout
from linear_core.models import Shape, shape_of
from linear_core.recipe import Recipe, parse_layers

# what this transformers release calls a model's cache: "cache" from 5.24 on, "past_key_values" before
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class LinearizedModel(nn.Module):
    """Mixed in front of a family's ``…ForCausalLM``: its ``forward`` makes the layout that every layer reads."""

    recipe: Recipe
    # new parameters stay float32 when a folder is loaded in bfloat16
    _keep_in_fp32_modules_strict = ("mechanism", "convolutions", "merge")
    _supports_flash_attn = False
    _is_stateful = True  # transformers then refuses to roll a cache back (assisted decoding)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LinearizedCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: LinearizedCache | None = None,
        document_ids: Tensor | None = None,
        paths: str = "hybrid",
        state_frozen_from: int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of a [B, T] batch.

        attention_mask: [B, tokens so far] 0 at pads (left, right or both). position_ids are computed from it and ignored
        when given. cache (or past_key_values, its older name): of ``new_cache``; the pass continues it. document_ids:
        [B, T] isolates the documents of packed rows. paths and state_frozen_from: attribution (recipe section 6).
        """
        tokens = input_ids if input_ids is not None else inputs_embeds
        if tokens is None:
            raise ValueError("input_ids or inputs_embeds must be given")
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache and not self.training and document_ids is None:
            cache = self.new_cache(tokens.shape[0])
        if cache is not None and not isinstance(cache, LinearizedCache):
            raise ValueError(
                f"a linearized model needs its own cache (model.new_cache(batch_size)), not a {type(cache).__name__}"
            )
        layout = make_layout(
            tokens.shape[0], tokens.shape[1], tokens.device, mask=attention_mask, document_ids=document_ids,
            cache=cache, paths=paths, state_frozen_from=state_frozen_from,
        )  # fmt: skip
        output = super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask if self._has_softmax_layers or paths == "base" else None,
            position_ids=layout.positions,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=False,
            logits_to_keep=logits_to_keep,
            layout=layout,
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )
        if cache is not None:
            cache.advance(tokens.shape[1], layout.num_tokens)
            output[CACHE_ARGUMENT] = cache
        return output

    @property
    def _has_softmax_layers(self) -> bool:
        return any(not isinstance(m, LinearizedAttention) for m in attention_modules(self))

    def new_cache(self, batch_size: int) -> LinearizedCache:
        """An empty cache for ``batch_size`` sequences on the model's device."""
        shapes = [m.cache_shape() if isinstance(m, LinearizedAttention) else None for m in attention_modules(self)]
        return LinearizedCache(shapes, batch_size, self.device)  # type: ignore[arg-type]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int, *args: Any
    ) -> None:
        """generate() gets a LinearizedCache of the expanded batch instead of a growing one."""
        if model_kwargs.get(CACHE_ARGUMENT) is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation is not None:
                raise ValueError("a linearized model has one kind of cache; leave cache_implementation out")
            expand = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            model_kwargs[CACHE_ARGUMENT] = self.new_cache(batch_size * expand)


class LinearizedLlamaConfig(LlamaConfig):
    """Of an exported folder: its own model type, so that nobody loads it as a plain LLaMA by mistake."""

    model_type = "linearized_llama"


class LinearizedQwen3Config(Qwen3Config):
    """Of an exported folder: its own model type, so that nobody loads it as a plain Qwen3 by mistake."""

    model_type = "linearized_qwen3"


class LinearizedLlamaForCausalLM(LinearizedModel, LlamaForCausalLM):
    """A linearized LLaMA."""

    config_class = LinearizedLlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        install_from_config(self)


class LinearizedQwen3ForCausalLM(LinearizedModel, Qwen3ForCausalLM):
    """A linearized Qwen3."""

    config_class = LinearizedQwen3Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        install_from_config(self)


MODEL_CLASSES = {"llama": LinearizedLlamaForCausalLM, "qwen3": LinearizedQwen3ForCausalLM}


ATTENTION_CLASSES: dict[type, type] = {}  # one for each family, made when first needed


def _attention_class(base: type) -> type:
    if base not in ATTENTION_CLASSES:
        ATTENTION_CLASSES[base] = type(
            f"Linearized{base.__name__}", (LinearizedAttention, base), {"__module__": __name__}
        )
    return ATTENTION_CLASSES[base]


def attention_modules(model: PreTrainedModel | LinearizedModel) -> list[Any]:
    """The attention module of each layer, in order."""
    return [layer.self_attn for layer in model.model.layers]  # type: ignore[union-attr]


def convert(model: PreTrainedModel, recipe: Recipe, *, seed: int = 0) -> Any:
    """Linearize a frozen model in place and return it.

    New parameters are float32, start as recipe sections 3, 4 and 7 say, drawn from ``seed`` alone, and are the only
    ones that want gradients. Layers of ``recipe.softmax_layers`` keep the base's attention. Raises ValueError for an
    unsupported architecture, a model that is already converted, and layers that the model does not have.
    """
    family = getattr(model.config, "model_type", None)
    if isinstance(model, LinearizedModel):
        raise ValueError("the model is linearized already; unconvert() it first")
    if family not in MODEL_CLASSES or not isinstance(model, (LlamaForCausalLM, Qwen3ForCausalLM)):
        raise ValueError(
            f"cannot linearize {type(model).__name__}; supported: {', '.join(c.__name__[10:] for c in MODEL_CLASSES.values())}"
        )
    keep = softmax_layers(recipe, model.config.num_hidden_layers)
    model.requires_grad_(False)
    model.__class__ = MODEL_CLASSES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _install(model, recipe, keep)
    return model


def softmax_layers(recipe: Recipe, num_layers: int) -> frozenset[int]:
    """The layers that keep softmax attention."""
    return (
        frozenset(range(num_layers))
        if recipe.mechanism == "softmax"
        else parse_layers(recipe.softmax_layers, num_layers)
    )


def install_from_config(model: Any) -> None:
    """For ``from_pretrained`` of an exported folder: config.golinear holds the recipe."""
    recipe = Recipe(**model.config.golinear)
    _install(model, recipe, softmax_layers(recipe, model.config.num_hidden_layers))


def _install(model: Any, recipe: Recipe, keep: frozenset[int]) -> None:
    model.recipe = recipe
    shape = shape_of(model.config)
    linear = [i for i in range(model.config.num_hidden_layers) if i not in keep]
    for index in linear:
        attention = attention_modules(model)[index]
        meta = attention.q_proj.weight.device.type == "meta"
        attention.__class__ = _attention_class(type(attention))
        # drawn on the CPU, so that a seed means the same numbers on every device
        with torch.device("meta" if meta else "cpu"):
            attention.install(shape, recipe)
        for _, parameter in attention.new_parameters():
            parameter.data = parameter.data.to(attention.q_proj.weight.device, torch.float32)
    if recipe.adaptation == "lora" and linear:
        add_lora(model, linear, recipe.lora_rank, recipe.lora_alpha)
    for parameter in new_parameters(model).values():
        parameter.requires_grad_(True)


def unconvert(model: Any) -> PreTrainedModel:
    """The base model again, in place: new parameters gone, every weight as it was."""
    for attention in attention_modules(model):
        if isinstance(attention, LinearizedAttention):
            remove_lora(attention)
            attention.uninstall()
            attention.__class__ = type(attention).__mro__[2]
    del model.recipe
    model.__class__ = type(model).__mro__[2]
    return model


def new_parameters(model: Any) -> dict[str, nn.Parameter]:
    """What conversion added, by name, in a fixed order."""
    found: dict[str, nn.Parameter] = {}
    for index, attention in enumerate(attention_modules(model)):
        if isinstance(attention, LinearizedAttention):
            prefix = f"model.layers.{index}.self_attn."
            found.update({prefix + name: p for name, p in attention.new_parameters()})
            found.update({prefix + name: p for name, p in attention.named_parameters() if "lora_" in name})
    return found


@contextmanager
def base_attention(model: Any) -> Iterator[None]:
    """Within it, ``model(…, paths="base")`` is the frozen base model to the last bit (LoRA is switched off)."""
    modules = [m for m in attention_modules(model) if isinstance(m, LinearizedAttention)]
    for module in modules:
        set_lora(module, False)
    try:
        yield
    finally:
        for module in modules:
            set_lora(module, True)


def save_new_parameters(model: Any, path: Path | str) -> None:
    """Write the new parameters as safetensors, the recipe in its metadata; atomic."""
    from safetensors.torch import save_file

    path = Path(path)
    tensors = {name: p.detach().cpu().contiguous() for name, p in new_parameters(model).items()}
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt", "recipe": json.dumps(model.recipe.to_dict(), sort_keys=True)})
    partial.replace(path)


def read_recipe(path: Path | str) -> Recipe:
    """The recipe that a file of new parameters was made with. Raises ValueError for other files."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
    if "recipe" not in metadata:
        raise ValueError(f"{path} holds no golinear recipe; it was not written by save_new_parameters")
    return Recipe(**json.loads(metadata["recipe"]))


def load_new_parameters(model: Any, path: Path | str) -> None:
    """Fill a converted model's new parameters. Raises ValueError when recipe, names or shapes differ."""
    from safetensors.torch import load_file

    if (recipe := read_recipe(path)) != model.recipe:
        ours, theirs = model.recipe.to_dict(), recipe.to_dict()
        differ = [f"{k} {theirs[k]} ≠ {ours[k]}" for k in ours if ours[k] != theirs[k]]
        raise ValueError(f"{path} was made with another recipe: {', '.join(differ)}")
    stored, ours = load_file(str(path)), new_parameters(model)
    if stored.keys() != ours.keys():
        raise ValueError(f"{path} does not fit the model: it differs in {sorted(stored.keys() ^ ours.keys())[:3]} …")
    with torch.no_grad():
        for name, parameter in ours.items():
            if stored[name].shape != parameter.shape:
                raise ValueError(
                    f"{path}: {name} has shape {list(stored[name].shape)}, the model wants {list(parameter.shape)}"
                )
            parameter.copy_(stored[name])


def parameter_count(shape: Shape, recipe: Recipe) -> int:
    """New parameters of a recipe on a base model of this shape, from the real modules on the meta device."""
    from linear_core.models import build

    one_layer = dataclasses.replace(shape, layers=1, vocab=8)
    count = sum(
        p.numel()
        for p in new_parameters(convert(build(one_layer), dataclasses.replace(recipe, softmax_layers="none"))).values()
    )
    return count * (shape.layers - len(softmax_layers(recipe, shape.layers)))
