"""Each mechanism's layer against the full-attention layer: time and memory of forward, backward and one decode step.

    golinear bench mechanisms                          on the CPU: also against the token loop, with the targets
    golinear bench mechanisms --device cuda            T = 2k … 128k at LLaMA-3.1-8B shapes

A layer is the whole attention block: projections, rotation, mechanism, output projection; frozen, with random weights,
and gradients for its input and for the new parameters. Both sides of a ratio come from one process, on the CPU in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_core.bench.report import show
from linear_core.convert import attention_modules, convert
from linear_core.kernels import forced
from linear_core.layout import make_layout
from linear_core.mechanisms import MECHANISMS
from linear_core.models import Shape, build, resolve
from linear_core.recipe import Recipe, parse_budget

DEFAULT = tuple(name for name in MECHANISMS if name not in ("none", "softmax"))
LENGTHS = {"cpu": (512,), "cuda": tuple(1024 * 2**i for i in range(1, 8))}
MODELS = {"cpu": "smollm2-135m", "cuda": "llama3.1-8b"}
# at T = 512 on the CPU: times faster than the token loop, and times the full-attention layer
LEAST_SPEEDUP = {"gla": 3.0}
LEAST_SPEEDUP_ELSEWHERE = 4.0
MOST_TIMES_FULL = 3.0


class Layer:
    """One attention block of a shape, full attention (no recipe) or linearized, with an input of T tokens to run it on."""

    def __init__(self, shape: Shape, recipe: Recipe | None, device: str, dtype: torch.dtype) -> None:
        model = build(dataclasses.replace(shape, layers=1, vocab=8), device="cpu").to(dtype)
        if recipe is not None:
            model = convert(model, recipe)
        self.model, self.recipe, self.shape, self.device, self.dtype = model.to(device), recipe, shape, device, dtype
        self.attention = attention_modules(self.model)[0]

    def prepare(self, tokens: int, batch: int = 1) -> Callable[[], Tensor]:
        """A forward pass over [batch, tokens], whose inputs are made here, once."""
        h = torch.randn(batch, tokens, self.shape.hidden, device=self.device, dtype=self.dtype, requires_grad=True)
        layout = make_layout(batch, tokens, h.device)
        rotation = self.model.model.rotary_emb(h, layout.positions)
        if self.recipe is None:
            return lambda: self.attention(h, rotation, None)[0]
        return lambda: self.attention(h, rotation, layout=layout)[0]

    def prepare_step(self, tokens: int, batch: int = 1) -> Callable[[], Tensor]:
        """A decode step behind ``tokens`` tokens. Full attention reads keys and values that lie ready: nothing is appended."""
        h = torch.randn(batch, 1, self.shape.hidden, device=self.device, dtype=self.dtype)
        position = torch.full((batch, 1), tokens, device=self.device)
        rotation = self.model.model.rotary_emb(h, position)
        if self.recipe is None:
            heads, size = self.shape.kv_heads, self.shape.head_dim
            keys, values = (torch.randn(batch, heads, tokens, size, device=self.device, dtype=self.dtype) for _ in "kv")
            return lambda: self._full_step(h, keys, values)
        cache = self.model.new_cache(batch)
        cache.positions.fill_(tokens)
        layout = make_layout(batch, 1, h.device, cache=cache)
        return lambda: self.attention(h, rotation, layout=layout)[0]

    def _full_step(self, h: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, _, _ = (
            project(h).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for project in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        )
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return self.attention.o_proj(y.transpose(1, 2).flatten(-2))


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of a forward pass and of the backward pass behind it, and the peak of both in MiB (CUDA only)."""

    forward: float
    backward: float
    peak: float | None

    @property
    def total(self) -> float:
        return self.forward + self.backward


Clock = Callable[[], float]


def measure(
    forwards: dict[str, Callable[[], Tensor]], *, device: str, repeats: int, clock: Clock = time.perf_counter
) -> dict[str, Cost]:
    """The best of ``repeats`` rounds; every round runs all of them in turn, so that a busy machine hits all alike."""
    costs: dict[str, list[Cost]] = {name: [] for name in forwards}
    for turn in range(repeats + 1):
        for name, forward in forwards.items():
            cost = _once(forward, device, clock)
            if turn:  # the first round compiles and warms up
                costs[name].append(cost)
    return {
        name: Cost(min(c.forward for c in runs), min(c.backward for c in runs), runs[-1].peak)
        for name, runs in costs.items()
    }


def _once(forward: Callable[[], Tensor], device: str, clock: Clock) -> Cost:
    cuda = device.startswith("cuda")
    synchronize = torch.cuda.synchronize if cuda else lambda: None
    before = 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    synchronize()
    start = clock()
    y = forward()
    synchronize()
    middle = clock()
    y.backward(torch.ones_like(y))
    synchronize()
    end = clock()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
    return Cost((middle - start) * 1e3, (end - middle) * 1e3, peak)


def measure_step(step: Callable[[], Tensor], device: str, repeats: int) -> float:
    """Milliseconds of one decode step: the best of ``repeats`` runs of 10."""
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    best = float("inf")
    with torch.no_grad():
        for _ in range(repeats + 1):
            synchronize()
            start = time.perf_counter()
            for _ in range(10):
                step()
            synchronize()
            best = min(best, (time.perf_counter() - start) * 100)
    return best


def on_the_cpu(
    shape: Shape, recipes: dict[str, Recipe], tokens: int, repeats: int, clock: Clock = time.perf_counter
) -> Iterator[dict[str, Any]]:
    """Chunked against the token loop and against full attention, forward and backward, with the targets."""
    layers = {name: Layer(shape, recipe, "cpu", torch.float32) for name, recipe in recipes.items()}
    full = Layer(shape, None, "cpu", torch.float32).prepare(tokens)
    runs = {name: layer.prepare(tokens) for name, layer in layers.items()}
    fast = measure({"softmax": full, **runs}, device="cpu", repeats=repeats, clock=clock)
    with forced("reference"):
        slow = measure(runs, device="cpu", repeats=max(1, repeats // 3), clock=clock)
    softmax = fast.pop("softmax")
    yield {"mechanism": "softmax", "T": tokens, "forward_ms": softmax.forward, "backward_ms": softmax.backward}
    for name, cost in fast.items():
        wanted = LEAST_SPEEDUP.get(name, LEAST_SPEEDUP_ELSEWHERE)
        speedup, times = slow[name].total / cost.total, cost.total / softmax.total
        yield {
            "mechanism": name, "T": tokens, "forward_ms": cost.forward, "backward_ms": cost.backward,
            "token_loop_ms": slow[name].total, "faster_than_loop": speedup, "least": wanted,
            "times_full": times, "most": MOST_TIMES_FULL,
            "within_targets": "yes" if speedup >= wanted and times <= MOST_TIMES_FULL else "no",
        }  # fmt: skip


def by_length(
    shape: Shape, recipes: dict[str, Recipe], lengths: Sequence[int], repeats: int, device: str, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Against full attention at each length: forward, backward, peak memory, and a decode step behind that many tokens."""
    kinds: dict[str, Recipe | None] = {"softmax": None, **recipes}
    layers = {name: Layer(shape, recipe, device, dtype) for name, recipe in kinds.items()}
    for tokens in lengths:
        full: dict[str, Any] = {}
        for name, layer in layers.items():
            row: dict[str, Any] = {"mechanism": name, "T": tokens}
            with _fits(row):
                cost = measure({name: layer.prepare(tokens)}, device=device, repeats=repeats)[name]
                row |= {"forward_ms": cost.forward, "backward_ms": cost.backward, "peak_MiB": cost.peak}
                row["step_ms"] = measure_step(layer.prepare_step(tokens), device, repeats)
                if layer.recipe is not None and device.startswith("cuda"):
                    with forced("recurrent"):
                        row["one_kernel_step_ms"] = measure_step(layer.prepare_step(tokens), device, repeats)
            full = full or row
            yield row | _against(full, row)


def _against(full: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """How many times faster than full attention, and the share of its memory, where both could be measured."""
    if "step_ms" not in row or "step_ms" not in full:
        return {}
    both, whole = (r["forward_ms"] + r["backward_ms"] for r in (row, full))
    share = row["peak_MiB"] / full["peak_MiB"] if row["peak_MiB"] else None
    return {"speedup": whole / both, "step_speedup": full["step_ms"] / row["step_ms"], "memory_share": share}


@contextmanager
def _fits(row: dict[str, Any]) -> Iterator[None]:
    """Out of memory is a result, not an error: the row says so."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        row["note"] = "out of memory"


def run(
    *,
    device: str = "cpu",
    model: str | None = None,
    mechanisms: Sequence[str] = DEFAULT,
    budget: str = "0+0",
    lengths: Sequence[int] = (),
    repeats: int = 5,
    cpu_time: bool = False,
) -> Iterator[dict[str, Any]]:
    """The rows of the table, as they are measured. model: a base model's name, for its shape. cpu_time: CPU seconds of one
    thread (on the CPU). Raises ValueError for unknown names and budgets."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    shape = resolve(model or MODELS[kind]).shape
    window, sinks = parse_budget(budget)
    recipes = {name: Recipe(mechanism=name, window=window, sinks=sinks) for name in mechanisms}
    if kind == "cpu":
        clock = time.process_time if cpu_time else time.perf_counter
        torch.set_num_threads(1 if cpu_time else torch.get_num_threads())
        return (
            row for tokens in lengths or LENGTHS[kind] for row in on_the_cpu(shape, recipes, tokens, repeats, clock)
        )
    return by_length(shape, recipes, lengths or LENGTHS[kind], repeats, device, torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show. Returns 1 when a target is missed (the CPU has targets), else 0."""
    parser = argparse.ArgumentParser(prog="golinear bench mechanisms", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="whose shape (default: smollm2-135m on the CPU, llama3.1-8b on CUDA)")
    parser.add_argument("--mechanisms", default=",".join(DEFAULT), help="comma-separated names")
    parser.add_argument("--budget", default="0+0", help="window+sinks of the exact path (default: the mechanism alone)")
    parser.add_argument(
        "--lengths", default="", help="comma-separated numbers of tokens (default: 512, or 2048 … 131072)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the best counts")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time of one thread instead of wall time, for a machine that others use",
    )
    parser.add_argument("--output", help="write the rows as JSON")
    options = parser.parse_args(argv)
    measured = run(
        device=options.device, model=options.model, mechanisms=options.mechanisms.split(","), budget=options.budget,
        lengths=[int(n) for n in options.lengths.split(",") if n], repeats=options.repeats,
        cpu_time=options.cpu_time,
    )  # fmt: skip
    title = f"attention layers, budget {options.budget}, on {options.device}"
    rows = show(title, measured, device=options.device, output=options.output)
    return 1 if any(row.get("within_targets") == "no" for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
