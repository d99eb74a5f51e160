"""Prefill of a prompt and 16 tokens after it, linearized against full attention: the paper's figure 2a, on to 128K.

    golinear bench prefill --model llama3.1-8b --recipe "gdn 56+8" --lengths 2048,32768,131072
    golinear bench prefill --tiny                      a dry run on the CPU, seconds

Random weights and tokens. The linearized model takes the prompt in pieces and makes the last token's logits only; full
attention takes it a sequence at a time through SDPA (FlashAttention), which needs the least memory. The 16 tokens are
plain forward calls; ``golinear bench decode`` measures them without Python's share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from linear_core.bench.decode import NEW_TOKENS, parser
from linear_core.bench.report import show
from linear_core.bench.train import GIB, TINY
from linear_core.convert import CACHE_ARGUMENT, convert
from linear_core.models import Shape, build, resolve
from linear_core.recipe import Recipe

PIECE = 32768  # tokens of a piece of the linearized prefill, all sequences together


def linear_prefill(model: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(cache, next tokens [B, 1]) after tokens [B, T], taken in pieces."""
    cache = model.new_cache(len(tokens))
    for piece in tokens.split(max(1, PIECE // len(tokens)), dim=1):
        logits = model(input_ids=piece, cache=cache, logits_to_keep=1).logits
    return cache, logits[:, -1:].argmax(-1)


def full_prefill(model: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(cache, next tokens [B, 1]) of the base model after tokens [B, T], a sequence at a time."""
    caches, nexts = [], []
    for row in tokens.split(1):
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=row, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
        caches.append(cache)
        nexts.append(logits[:, -1:].argmax(-1))
    joined = DynamicCache(config=model.config)
    for index in range(len(caches[0].layers)):
        keys, values = ([getattr(c.layers[index], part) for c in caches] for part in ("keys", "values"))
        joined.update(torch.cat(keys), torch.cat(values), index)
        for cache in caches:  # what is joined is let go
            cache.layers[index].keys = cache.layers[index].values = None
    return joined, torch.cat(nexts)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds now."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.inference_mode()
def measure(what: str, model: Any, prefill: Callable[..., Any], tokens: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Median seconds of the prefill, and of 16 tokens after it; a first run warms up and is not counted."""
    on_gpu = tokens.device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    row: dict[str, Any] = {"what": what, "length": tokens.shape[1], "sequences": len(tokens), "prefill_ms": None}
    times = []
    cache: Any = None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(repeats + 1):
            cache = None
            wait()
            started = time.perf_counter()
            cache, token = prefill(model, tokens)
            wait()
            middle = time.perf_counter()
            size = cache_bytes(cache)
            for _ in range(NEW_TOKENS):
                token = model(input_ids=token, use_cache=True, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
            wait()
            times.append((middle - started, time.perf_counter() - middle))
    except torch.OutOfMemoryError:
        cache = None
        return row | {"note": "out of memory"}
    finally:
        if on_gpu:
            torch.cuda.empty_cache()
    seconds, after = (statistics.median(t[i] for t in times[1:]) for i in (0, 1))
    return row | {
        "prefill_ms": 1000 * seconds, "prefill_tokens_per_second": tokens.numel() / seconds, "16_tokens_ms": 1000 * after,
        "total_ms": 1000 * (seconds + after), "cache_mib": size / 2**20,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
    }  # fmt: skip


def run(
    shape: Shape, recipe: Recipe, *, device: str, lengths: Sequence[int], batch_size: int = 8, repeats: int = 3
) -> Iterator[dict[str, Any]]:
    """Full attention at every length, then the linearized model; ``times_full``: full attention's total over its own."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = build(shape, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    prompts = {n: torch.randint(0, shape.vocab, (batch_size, n), generator=generator).to(device) for n in lengths}
    full = {}
    for length, tokens in prompts.items():
        row = measure("full attention", model, full_prefill, tokens, repeats)
        full[length] = row.get("total_ms")
        yield row
    model = convert(model, recipe)
    for length, tokens in prompts.items():
        row = measure(recipe.name, model, linear_prefill, tokens, repeats)
        ours, theirs = row.get("total_ms"), full[length]
        yield row | {"times_full": theirs / ours if ours and theirs else None}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show. 1 when the linearized model's cache is not of one size at all lengths."""
    options = parser("prefill", (__doc__ or "").partition("\n")[0]).parse_args(argv)
    shape = TINY if options.tiny else resolve(options.model).shape
    lengths = [64, 128] if options.tiny else [int(n) for n in options.lengths.split(",")]
    recipe = Recipe.parse(options.recipe)
    repeats = 1 if options.tiny else 3
    measured = run(
        shape, recipe, device=options.device, lengths=lengths, batch_size=options.batch_size, repeats=repeats
    )
    name = "tiny" if options.tiny else options.model
    rows = show(f"Prefill, {name}", measured, device=options.device, output=options.output)
    sizes = {row["cache_mib"] for row in rows if row["what"] == recipe.name and "cache_mib" in row}
    return int(len(sizes) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
