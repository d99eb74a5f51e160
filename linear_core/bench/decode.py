"""Decoding speed and cache size of a linearized model against full attention, in one run (recipe section 6).

    golinear bench decode --model llama3.1-8b --recipe "gdn 56+8" --lengths 2048,32768,65536,131072
    golinear bench decode --tiny                       a dry run on the CPU, seconds

Random weights. A step makes one token of every sequence from a cache that stands at the given length. On CUDA each step
is a replayed CUDA graph, for both sides: full attention keeps its keys and values in slots made beforehand, and attends
through SDPA (FlashAttention with split keys). Its slots are filled with noise: the time does not depend on what is in
them. ``of weights``: the step over a measured read of the bytes of all weights but the embedding, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from linear_core.bench.report import show
from linear_core.bench.train import GIB, TINY
from linear_core.convert import CACHE_ARGUMENT, convert, unconvert
from linear_core.models import Shape, build, resolve
from linear_core.recipe import Recipe

NEW_TOKENS = 16
MOST_SEQUENCES = 4096


class Slots(CacheLayerMixin):
    """Keys and values of full attention in buffers made once: [B, G, length + new tokens, D], all attended to."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        """at: [1] the slot that the next token is written to, moved on by the caller."""
        super().__init__()
        self.keys, self.values, self.at = keys, values, at
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the buffers are made with it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.at, key_states)
        self.values.index_copy_(2, self.at, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - NEW_TOKENS

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def full_step(model: Any, shape: Shape, batch_size: int, length: int) -> tuple[Callable[[], None], int]:
    """(one decoding step of the base model at this length, bytes of its cache)."""
    device, dtype = model.device, model.dtype
    size = (batch_size, shape.kv_heads, length + NEW_TOKENS, shape.head_dim)
    at = torch.full((1,), length, device=device)
    layers = [
        Slots(torch.randn(size, device=device, dtype=dtype), torch.randn(size, device=device, dtype=dtype), at)
        for _ in range(shape.layers)
    ]
    cache = Cache(layers=layers)
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=device)

    def step() -> None:
        out = model(input_ids=tokens, position_ids=at[None].expand(batch_size, 1), use_cache=True, **{CACHE_ARGUMENT: cache})
        tokens.copy_(out.logits[:, -1:].argmax(-1))

    return step, sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in layers)


def linear_step(model: Any, batch_size: int, length: int) -> tuple[Callable[[], None], int]:
    """(one decoding step of the linearized model at this length, bytes of its cache).

    The cache's tensors stay where they are, as a CUDA graph needs: each step's new ones are copied back into them.
    """
    cache = model.new_cache(batch_size)
    start = torch.zeros(batch_size, min(length, 256), dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(input_ids=start, cache=cache, logits_to_keep=1)
    cache.positions = torch.full_like(cache.positions, length)
    held = [(layer, name, tensor) for layer in cache.layers for name, tensor in layer.tensors().items()]
    positions = cache.positions
    tokens = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)

    def step() -> None:
        out = model(input_ids=tokens, cache=cache, logits_to_keep=1)
        for layer, name, tensor in held:
            if (new := getattr(layer, name)) is not tensor:
                tensor.copy_(new)
                setattr(layer, name, tensor)
        positions.copy_(cache.positions)
        cache.positions = positions
        tokens.copy_(out.logits[:, -1:].argmax(-1))

    return step, cache.nbytes


@torch.inference_mode()
def time_steps(step: Callable[[], None], device: str, steps: int = NEW_TOKENS) -> float:
    """Median seconds of a step; on CUDA of a replayed graph of it, measured with the device idle before and after."""
    if not device.startswith("cuda"):
        return statistics.median(_timed(step, lambda: None) for _ in range(steps))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(_timed(graph.replay, torch.cuda.synchronize) for _ in range(steps))


def _timed(step: Callable[[], object], wait: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started


def weight_bytes(model: Any) -> int:
    """Bytes that a step must read: every weight but an embedding that is only looked up."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if tied or p is not embedding)


def time_read(num_bytes: int, device: str) -> float:
    """Seconds that a read of so many bytes takes on this device: the best of ten sums over a buffer of them."""
    buffer = torch.zeros(max(1, num_bytes // 4), dtype=torch.float32, device=device)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    return min(_timed(lambda: buffer.sum(), wait) for _ in range(13))


def run(shape: Shape, recipe: Recipe, *, device: str, lengths: Sequence[int], batch_size: int = 8) -> Iterator[dict[str, Any]]:
    """One row a measurement: the read of the weights, batch 1 and ``batch_size`` of both models, largest batches.

    Rows: what, length, sequences, ms_per_token_step, tokens_per_second, of_weights (step over the read), times_full
    (full attention's step over it), cache_mib; ``ms_per_token_step`` None with ``note`` where memory did not suffice.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = build(shape, device=device, dtype=dtype)
    size = weight_bytes(model)
    read = time_read(size, device)
    yield {"what": f"read of the weights, {size / GIB:.2f} GiB", "ms_per_token_step": 1000 * read, "of_weights": 1.0}
    full: dict[tuple[int, int], float | None] = {}
    for sequences in (1, batch_size):
        for length in lengths:
            row = _measure("full attention", lambda: full_step(model, shape, sequences, length), sequences, length, read, device)  # noqa: B023
            full[sequences, length] = row["ms_per_token_step"]
            yield row
    yield _largest("full attention", lambda n: full_step(model, shape, n, max(lengths)), max(lengths), device)
    model = convert(model, recipe)
    for sequences in (1, batch_size):
        for length in lengths:
            row = _measure(recipe.name, lambda: linear_step(model, sequences, length), sequences, length, read, device)  # noqa: B023
            ours, theirs = row["ms_per_token_step"], full[sequences, length]
            yield row | {"times_full": theirs / ours if ours and theirs else None}
    yield _largest(recipe.name, lambda n: linear_step(model, n, max(lengths)), max(lengths), device)
    unconvert(model)


def _measure(
    what: str, make: Callable[[], tuple[Callable[[], None], int]], sequences: int, length: int, read: float, device: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "length": length, "sequences": sequences, "ms_per_token_step": None}
    try:
        step, cache_bytes = make()
        seconds = time_steps(step, device)
    except torch.OutOfMemoryError:
        row["note"] = "out of memory"
        return row
    finally:
        if device.startswith("cuda"):
            torch.cuda.empty_cache()
    return row | {
        "ms_per_token_step": 1000 * seconds, "tokens_per_second": sequences / seconds, "of_weights": seconds / read,
        "cache_mib": cache_bytes / 2**20,
    }  # fmt: skip


def _largest(what: str, make: Callable[[int], tuple[Callable[[], None], int]], length: int, device: str) -> dict[str, Any]:
    """The largest power of two of sequences that makes a step at this length (CUDA only: elsewhere memory is not a wall)."""
    fits = 0
    sequences = 1
    while device.startswith("cuda") and sequences <= MOST_SEQUENCES:
        try:
            step, _ = make(sequences)
            with torch.inference_mode():
                step()
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            break
        finally:
            step = None  # type: ignore[assignment]
            torch.cuda.empty_cache()
        fits, sequences = sequences, 2 * sequences
    return {"what": what, "length": length, "sequences": fits or None, "note": "largest batch (a power of two)"}


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """The options that decode and prefill share."""
    made = argparse.ArgumentParser(prog=f"golinear bench {name}", description=about)
    made.add_argument("--model", default="llama3.1-8b", help="whose shape")
    made.add_argument("--recipe", default="gdn 56+8")
    made.add_argument("--lengths", default="2048,8192,32768,65536,131072", help="comma-separated numbers of tokens")
    made.add_argument("--batch-size", type=int, default=8)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--tiny", action="store_true", help="a dry run: a tiny shape at 64 and 128 tokens")
    made.add_argument("--output", help="write the rows as JSON")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show. 1 when the linearized model's cache is not of one size at all lengths."""
    options = parser("decode", (__doc__ or "").partition("\n")[0]).parse_args(argv)
    shape = TINY if options.tiny else resolve(options.model).shape
    lengths = [64, 128] if options.tiny else [int(n) for n in options.lengths.split(",")]
    recipe = Recipe.parse(options.recipe)
    if recipe.mechanism == "softmax":
        raise ValueError("bench decode compares a linearized recipe with full attention; allowed: gdn 56+8, …")
    measured = run(shape, recipe, device=options.device, lengths=lengths, batch_size=options.batch_size)
    name = "tiny" if options.tiny else options.model
    rows = show(f"Decoding, {name}", measured, device=options.device, output=options.output)
    sizes = {(r["sequences"], r["cache_mib"]) for r in rows if r["what"] == recipe.name and "cache_mib" in r}
    return int(len(sizes) != len({sequences for sequences, _ in sizes}))


if __name__ == "__main__":
    raise SystemExit(main())
