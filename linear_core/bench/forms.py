"""Do all forms of a state update give the same outputs, states and gradients? A table of errors against the token loop.

    python -m linear_core.bench.forms --device cuda --first-config --output results/forms.json
    python -m linear_core.bench.forms --device cpu --tiny

Errors are relative RMSE against the token loop in float64 on the same (rounded) inputs. On a GPU the work is shared among
processes, because compiling the kernels takes most of the time. A form that fails costs its own row. Exits 1 when one
failed or an error is too large.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_core.bench.report import show
from linear_core.kernels import gated_delta_rule, gated_linear_attention, low_rank_delta_rule
from linear_core.kernels.tuned import tune_what_does_not_fit

logger = logging.getLogger(__name__)
Todo = list[tuple["Case", torch.dtype]]


def _linear(q, k, v, log_decay, beta, state, form):
    return gated_linear_attention(q, k, v, None, state=state, scale=0.5, implementation=form)


def _gated(q, k, v, log_decay, beta, state, form):
    return gated_linear_attention(q, k, v, log_decay, state=state, scale=0.5, implementation=form)


def _delta(q, k, v, log_decay, beta, state, form):
    return gated_delta_rule(q, k, v, log_decay, beta, state=state, scale=0.5, implementation=form)


def _low_rank(q, k, v, log_decay, beta, state, form):
    """The gated delta rule from the logits of its decays, by a product with the identity: the form that trains gdn."""
    logits = log_decay - torch.log((-torch.expm1(log_decay)).clamp(min=1e-6))
    identity = torch.eye(logits.shape[2] * logits.shape[3], dtype=logits.dtype, device=logits.device)
    return low_rank_delta_rule(
        q, k, v, logits.flatten(2), identity, 0 * identity[0], beta, state=state, scale=0.5, implementation=form
    )


RULES = {
    "linear_attention": _linear,
    "gated_linear_attention": _gated,
    "gated_delta_rule": _delta,
    "low_rank_delta_rule": _low_rank,
}
DTYPES = (torch.float32, torch.bfloat16)
GATES = ("usual", "near 0", "near 1", "both")
NAMES = ("q", "k", "v", "log_decay", "beta", "state")
QUANTITIES = ("out", "state", *(f"d_{name}" for name in NAMES))
# Gradients smaller than this (root mean square, of order 1 elsewhere) are compared absolutely: 0 has no relative error.
SMALLEST = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: heads query heads over kv_heads (0: as many); size is K, and V unless value_size says other."""

    rule: str
    tokens: int
    heads: int
    size: int
    kv_heads: int = 0
    value_size: int = 0
    gates: str = "usual"
    with_state: bool = False
    batch: int = 2

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads


def inputs(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [B, T, H, K], k and v [B, T, G, ·] of ``dtype``; log_decay, beta and state [B, H, K, V] float32.

    ``gates``: usual (sigmoid of a normal), or one in five near 0 (−30 and −1e4), near 1 (0), or both. Where they are
    not usual there are also zero vectors, one-hot keys with β → 1, and masked tokens. The same at every call.
    """
    random = torch.Generator().manual_seed(case.tokens * 1000 + case.heads * 10 + case.size)
    B, T, H, G, K, V = case.batch, case.tokens, case.heads, case.groups, case.size, case.value_size or case.size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    q, k, v = F.normalize(normal(B, T, H, K), dim=-1), F.normalize(normal(B, T, G, K), dim=-1), normal(B, T, G, V)
    log_decay, beta = F.logsigmoid(normal(B, T, H, K) + 1), torch.sigmoid(normal(B, T, H))
    if case.gates != "usual":
        lot = torch.rand(B, T, H, K, generator=random)
        if case.gates in ("near 0", "both"):
            log_decay = log_decay.where(lot > 0.2, torch.tensor(-30.0)).where(lot > 0.1, torch.tensor(-1e4))
        if case.gates in ("near 1", "both"):
            log_decay = log_decay.where(lot < 0.8, torch.tensor(0.0))
        token = torch.arange(T)
        one_hot = F.one_hot(token % K, K).float().view(1, T, 1, K).expand_as(k)
        k = torch.where((token % 5 == 1).view(1, T, 1, 1), one_hot, k)
        beta = torch.where((token % 5 == 1).view(1, T, 1), 1 - 1e-6, beta)
        q, k = (torch.where((token % 7 == shift).view(1, T, 1, 1), 0.0, x) for x, shift in ((q, 2), (k, 3)))
        masked = (token % 9 == 4).view(1, T, 1, 1)
        k, v, log_decay = (torch.where(masked, 0.0, x) for x in (k, v, log_decay))
        beta = torch.where(masked[..., 0], 0.0, beta)
    state = normal(B, H, K, V) / K**0.5
    return tuple(x.to(device, dtype) for x in (q, k, v)) + tuple(x.to(device) for x in (log_decay, beta, state))


def evaluate(case: Case, form: str, given: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """Output, final state, and the gradient of their weighted sum in every input that the rule uses (d_q, d_k, …)."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    q, k, v, log_decay, beta, state = leaves
    k, v = (x.repeat_interleave(case.heads // case.groups, dim=2) for x in (k, v))
    out, end = RULES[case.rule](q, k, v, log_decay, beta, state if case.with_state else None, form)
    total = (out.to(weights[0].dtype) * weights[0]).sum() + (end.to(weights[1].dtype) * weights[1]).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return {"out": out, "state": end} | {f"d_{n}": g for n, g in zip(NAMES, grads) if g is not None}


def compare(case: Case, form: str, *, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative RMSE of one form against the token loop in float64: {"out", "state", "d_q", …}; inf where not finite."""
    given, weights, wanted = _wanted(case, device, dtype)
    got = evaluate(case, form, given, weights)
    return {name: _error(got[name], wanted[name]) for name in wanted if name in got}


@lru_cache(maxsize=1)  # the forms of one case follow each other
def _wanted(case: Case, device: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], list[Tensor], dict[str, Tensor]]:
    """Inputs, the weights of the sum that is differentiated, and what the token loop makes of them in float64."""
    given = inputs(case, device, dtype)
    random = torch.Generator().manual_seed(1)
    value_size = case.value_size or case.size
    shapes = (case.batch, case.tokens, case.heads, value_size), (case.batch, case.heads, case.size, value_size)
    weights = [torch.randn(shape, generator=random).to(device) for shape in shapes]
    wanted = evaluate(case, "reference", [x.double() for x in given], [x.double() for x in weights])
    return given, weights, {name: x.detach() for name, x in wanted.items()}


def _error(got: Tensor, wanted: Tensor) -> float:
    got = got.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    smallest = SMALLEST * wanted.numel() ** 0.5
    return float((got - wanted).norm() / wanted.norm().clamp_min(smallest))


def tolerance(name: str, device: str, dtype: torch.dtype) -> float:
    """Allowed error: float32 1e-5, on CUDA 5e-3 (tf32 products); bfloat16 1e-2, for gate and β gradients 3e-2."""
    if dtype == torch.float32:
        return 5e-3 if device.startswith("cuda") else 1e-5
    return 3e-2 if name in ("d_log_decay", "d_beta") else 1e-2


def cases(tiny: bool, heads: int) -> Iterator[Case]:
    """All combinations the project promises; ``tiny`` keeps a few of each kind. One number of query heads for all
    (a kernel is compiled and tuned for each), over fewer key/value heads where H / G matters."""
    lengths = (1, 65) if tiny else (1, 7, 63, 64, 65, 100, 257)
    gate_kinds, starts = (GATES[-1:], (True,)) if tiny else (GATES, (False, True))
    for rule, tokens, gates, with_state in itertools.product(RULES, lengths, gate_kinds, starts):
        yield Case(rule=rule, tokens=tokens, heads=heads, size=64, gates=gates, with_state=with_state)
    for rule, groups, size in itertools.product(RULES, (3,) if tiny else (1, 3, 4, 8), (64,) if tiny else (64, 128)):
        yield Case(
            rule=rule, tokens=100, heads=heads, kv_heads=heads // groups, size=size, gates="both", with_state=True
        )
    for size in (64,) if tiny else (64, 128):  # hedgehog: its values carry a column of ones
        yield Case(rule="linear_attention", tokens=100, heads=heads, size=size, value_size=size + 1, with_state=True)


@contextmanager
def first_configuration() -> Iterator[None]:
    """Within it Triton takes, of each kernel, the smallest configuration that fits the card instead of timing all:
    minutes less, same results. Nothing of this reaches the autotuner's files."""
    from triton.runtime.autotuner import Autotuner

    tune_what_does_not_fit()

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if config is self.smallest_first[0]:
            self.fitting = None
        if self.fitting is not None:
            return [math.inf] * 3
        taken = kept["_bench"](self, *args, config=config, **meta)
        self.fitting = config if math.isfinite(taken[0]) else None
        return taken

    def prune(self: Any, kwargs: Any) -> list[Any]:
        self.smallest_first = sorted(kept["prune_configs"](self, kwargs), key=_size)
        return self.smallest_first

    def once(call: Any, quantiles: Any) -> list[float]:
        call()
        return [0.0] * 3

    changes = {
        "_bench": bench,
        "prune_configs": prune,
        "do_bench": property(lambda self: once),
        "check_disk_cache": lambda self, key, configs, bench: bench(),
    }
    kept = {name: vars(Autotuner)[name] for name in changes if name in vars(Autotuner)}
    for name in kept:
        setattr(Autotuner, name, changes[name])
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(Autotuner, name, original)


def _size(config: Any) -> tuple[float, ...]:
    """What a Triton configuration costs in shared memory: its tile, then its stages; then what compiles soonest."""
    tile = math.prod(value for value in config.kwargs.values() if isinstance(value, int) and value > 0)
    return tile, config.num_stages, abs(config.num_warps - 4)


def measure(todo: Todo, device: str, untuned: bool = False, threads: int = 0) -> list[dict[str, Any]]:
    """The errors of every fast form in each case: a row each of labels, the case, and its errors or its failure."""
    if threads:
        torch.set_num_threads(threads)
    fast, results = ("fla", "chunked") if device.startswith("cuda") else ("chunked",), []
    with first_configuration() if untuned else nullcontext():
        for case, dtype in todo:
            for form in fast if case.tokens > 1 else (*fast, "step"):
                result = _labels(case, dtype, form)
                try:
                    result["errors"] = compare(case, form, device=device, dtype=dtype)
                except Exception as error:  # whatever a compiler or a driver raises: the row says so, the others go on
                    result["failure"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                    logger.debug("%s", result, exc_info=True)
                results.append(result)
    return results


def _labels(case: Case, dtype: torch.dtype, form: str) -> dict[str, Any]:
    values, state = f"/{case.value_size}" * bool(case.value_size), " with a state" * case.with_state
    shape = f"T={case.tokens} H={case.heads}/{case.groups} D={case.size}{values}{state}"
    name = str(dtype).removeprefix("torch.")
    return {"rule": case.rule, "form": form, "dtype": name, "gates": case.gates, "case": shape}


def measure_in_processes(todo: Todo, device: str, jobs: int, untuned: bool = False) -> list[dict[str, Any]]:
    """``measure`` in ``jobs`` processes at a time, a fresh one for all cases that need the same kernels: one that dies, or
    loses its CUDA context, costs only these."""
    parts: dict[tuple[Any, ...], Todo] = {}
    for case, dtype in todo:
        parts.setdefault((dtype, case.rule, case.size, case.value_size, case.with_state), []).append((case, dtype))
    threads = max(1, (os.cpu_count() or 1) // jobs)

    def in_one(part: Todo) -> list[dict[str, Any]]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            try:
                return process.submit(measure, part, device, untuned, threads).result()
            except BrokenProcessPool as error:
                return [_labels(case, dtype, "all") | {"failure": f"its process died: {error}"} for case, dtype in part]

    with ThreadPoolExecutor(jobs) as pool:
        return list(itertools.chain.from_iterable(pool.map(in_one, sorted(parts.values(), key=len, reverse=True))))


def run(
    device: str, *, tiny: bool = False, dtypes: Sequence[torch.dtype] = DTYPES, jobs: int = 1, untuned: bool = False
) -> list[dict[str, Any]]:
    """Compare every fast form with the token loop. One row a rule, form, dtype and kind of gate: its worst errors, what
    is allowed (after the comma: of gate and β gradients), and whether all hold; a reason where not."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    todo = [(case, dtype) for dtype, case in itertools.product(dtypes, cases(tiny, 6 if tiny else 24))]
    results = measure_in_processes(todo, device, jobs, untuned) if jobs > 1 else measure(todo, device, untuned)
    for result in results:
        labels = {name: result[name] for name in ("rule", "form", "dtype", "gates")}
        row = rows.setdefault(tuple(labels.values()), labels | {"cases": 0, "verdict": "ok", "reason": ""})
        row["cases"] += 1
        dtype = getattr(torch, result["dtype"])
        allowed = {name: tolerance(name, device, dtype) for name in QUANTITIES}
        row["allowed"] = f"{allowed['out']:.0e}, {allowed['d_beta']:.0e}"
        for name, error in result.get("errors", {}).items():
            row[name] = max(error, row.get(name, 0.0))
            if error > allowed[name] and row["verdict"] == "ok":
                row |= {"verdict": "NOT OK", "reason": f"{name} is off by {error:.1e} at {result['case']}"}
        if "failure" in result:
            row |= {"verdict": "FAILED", "reason": f"{result['case']}: {result['failure']}"}
    columns = ("rule", "form", "dtype", "gates", "cases", *QUANTITIES, "allowed", "verdict", "reason")
    return [{k: row.get(k) for k in columns} for _, row in sorted(rows.items())]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and show it. Returns 0 when every error is allowed."""
    parser = argparse.ArgumentParser(prog="python -m linear_core.bench.forms", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a few cases of each kind")
    parser.add_argument("--first-config", action="store_true", help="do not tune the kernels (CUDA; minutes less)")
    parser.add_argument("--jobs", type=int, help="processes (default: one a processor on CUDA, 16 at most; else one)")
    parser.add_argument("--output", help="write the rows as JSON")
    options = parser.parse_args(argv)
    cuda = options.device.startswith("cuda")
    jobs = options.jobs or (min(16, os.cpu_count() or 1) if cuda else 1)
    rows = run(options.device, tiny=options.tiny, jobs=jobs, untuned=options.first_config and cuda)
    failed = [row for row in rows if row["verdict"] != "ok"]
    within = f"{len(rows) - len(failed)} of {len(rows)} rows within tolerance"
    title = f"forms against the token loop on {options.device}: {within}"
    show(title, rows, device=options.device, output=options.output, hidden=("reason",))
    for row in failed:
        labels = " ".join(row[name] for name in ("rule", "form", "dtype", "gates"))
        sys.stdout.write(f"{row['verdict']}: {labels}: {row['reason']}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
