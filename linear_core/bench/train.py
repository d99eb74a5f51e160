"""Training speed of a linearized model against the frozen base with full attention and the measured matmul ceiling.

    golinear bench train --model llama3.1-8b --recipe "gdn 56+8" --sequence-length 4096
    golinear bench train --model smollm2-135m --recipe "gdn 56+8,gla 56+8,none 56+8 lora" --objective layerwise
    golinear bench train --model qwen3-32b --checkpoint-activations --output 32b.json
    golinear bench train --tiny                        a dry run on the CPU, seconds
    torchrun --nproc-per-node 2 -m flows.cli bench train --batch-size 2 --shard-weights       two GPUs together

Random weights, made in the training precision on the device; random tokens. All rows are measured in one process, with the
same loss, compiled layers and recorded steps: ``full attention`` is the base with every parameter frozen, forward and the
backward pass of its activations; several recipes are trained together as ``linear_core.train.train_cells`` does, and
their tokens are counted per cell.
The limit is the ceiling over 4 FLOP per multiplied parameter (forward and activation backward; the embedding is
only looked up): attention itself and elementwise work are not in it, nor is what ``--checkpoint-activations`` computes
again. A model that leaves no room for its activations needs that (32B at 4k tokens on 141 GB, 8B at 32k); both sides of
the comparison then have it, in all layers or in a share of them. A row that does not fit says so, and the others are
measured all the same. Under torchrun the ranks train together: ``--batch-size`` is that of all of them, peak memory that of
the one that needs most, full attention is left out, and no step is recorded.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linear_core.bench.report import show
from linear_core.convert import convert, new_parameters
from linear_core.data import IGNORE
from linear_core.layerwise import twins
from linear_core.models import Shape, build, check_backbone, resolve
from linear_core.objectives import Sequences, cross_entropy_sum, last_hidden, make_objective
from linear_core.optim import NewParameterOptimizer
from linear_core.ranks import check_batch, current, shard, started_by_torchrun
from linear_core.recipe import Recipe
from linear_core.settings import BACKBONES, OBJECTIVES, TrainSettings
from linear_core.speed import EAGER_STEPS, FastStep, Recorded, checkpoint_activations, compiled
from linear_core.step import Trainee

TINY = Shape(
    family="llama", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512, tied=False,
    max_positions=4096, rope_theta=1e4, rms_eps=1e-5,
)  # fmt: skip
GIB = 1 << 30
WARM_UP = EAGER_STEPS + 2


def run(
    shape: Shape,
    recipes: Sequence[Recipe],
    *,
    device: str,
    lengths: Sequence[int],
    batch_size: int = 1,
    objective: str = "ce",
    steps: int = 10,
    ceiling_size: int = 8192,
    recompute: float = 0.0,
    sharded: bool = False,
    backbone: str = "full",
) -> Iterator[dict[str, Any]]:
    """One row each: full attention at every length, then the recipes at every length.

    recompute: the share of the layers whose activations are made again in the backward pass, on both sides. sharded: the
    frozen layers are spread over the ranks. backbone: as in TrainSettings. Rows: what, sequence_length,
    ms_per_step (median), tokens_per_second, of_limit (share of the limit by the ceiling), times_full (ratio to full
    attention's tokens per second), peak_gib (CUDA), seconds_to_first_step (with compiling). One that does
    not fit in memory has a note and no numbers; of several ranks it ends them.
    """
    me = current()
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    ceiling = matmul_ceiling(device, dtype, ceiling_size)
    limit = me.size * ceiling / (4 * (shape.layers * shape.layer_parameters + shape.vocab * shape.hidden))
    each = f" on each of {me.size} GPUs" if me.size > 1 else ""
    yield {"what": f"limit by {ceiling / 1e12:.2f} TFLOP/s{each}", "tokens_per_second": limit, "of_limit": 1.0}
    model = build(shape, device=device, dtype=dtype)
    if sharded:
        shard(model, device)
    if backbone == "int8":
        to_int8(model)
    yield {"what": "the frozen weights", "peak_gib": sum(map(bytes_here, model.parameters())) / GIB}
    how = f", {recompute:.0%} recomputed" if recompute else ""
    full: dict[int, float] = {}
    checkpoint_activations(model, recompute)
    for length in lengths if me.size == 1 else ():
        whole = functools.partial(full_attention_step, model)
        work = Recorded(whole) if device.startswith("cuda") else whole
        with compiled([model]):
            row = measure(
                f"full attention{how}", work, random_batch(shape, batch_size, length, device), 1, device, steps
            )
        del work  # the recorded step holds memory
        if rate := row.get("tokens_per_second"):
            full[length] = rate
            row |= {"of_limit": rate / limit, "times_full": 1.0}
        yield row
    checkpoint_activations(model, 0)
    settings = TrainSettings(tokens=10**9, sequence_length=lengths[0])
    models = [convert(m, recipe) for m, recipe in zip([model, *twins(model, len(recipes) - 1)], recipes)]
    trainees = [Trainee(m, NewParameterOptimizer(new_parameters(m), settings, 1e-4)) for m in models]
    for trainee in trainees:
        trainee.optimizer.set_rate(settings.warmup_steps)
        checkpoint_activations(trainee.model, recompute)
    how += ", int8" * (backbone == "int8") + f", {me.size} ranks" * (me.size > 1) + ", sharded" * sharded
    name, fast = f"{', '.join(r.name for r in recipes)} ({objective}{how})", FastStep(me)
    for length in lengths:
        batch, chosen = random_batch(shape, batch_size, length, device).share(me), make_objective(objective)
        chosen.prepare(models, batch, batch_size)
        train = functools.partial(fast, trainees, chosen, micro_batch=batch_size)
        with compiled(models):
            row = measure(name, train, batch, len(trainees), device, steps)
        fast.reset()
        if rate := row.get("tokens_per_second"):
            row |= {"of_limit": rate / limit, "times_full": rate / full[length] if length in full else None}
        yield row


def full_attention_step(model: Any, batch: Sequences) -> Tensor:
    """Forward and activation backward of a frozen model under the training loss. Returns the loss."""
    inputs = model.get_input_embeddings()(batch.input_ids).requires_grad_()
    hidden = last_hidden(model, None, inputs_embeds=inputs)
    loss = cross_entropy_sum(hidden, model.lm_head.weight, batch.labels) / batch.num_targets
    loss.backward()
    return loss.detach()


def measure(
    what: str, step: Callable[[Sequences], Tensor], batch: Sequences, cells: int, device: str, steps: int
) -> dict[str, Any]:
    """Time a step: the first one, some to warm up (and to be recorded), then the median of ``steps``."""
    on_gpu, me, length = device.startswith("cuda"), current(), batch.labels.shape[1]
    about = {"what": what, "sequence_length": length, "batch_size": batch.num_tokens // length}
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    try:
        for _ in range(steps + WARM_UP):
            started = time.perf_counter()
            step(batch)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    except torch.OutOfMemoryError as error:
        if me.size > 1:
            raise  # the others wait for this one
        return {**about, "note": f"does not fit: {str(error).partition('. ')[0]}"}
    seconds = statistics.median(times[WARM_UP:])
    return {
        **about,
        "ms_per_step": 1000 * seconds,
        "tokens_per_second": cells * batch.num_tokens / seconds,
        "peak_gib": max(me.gather(lambda: torch.cuda.max_memory_allocated() / GIB)) if on_gpu else None,
        "seconds_to_first_step": times[0],
    }


def to_int8(model: Any) -> None:
    """The matrices of the decoder layers in 8 bits, in place, as ``models.load`` has them with ``backbone="int8"``."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model.model.layers, Int8WeightOnlyConfig())


def bytes_here(weight: Any) -> int:
    """Bytes of a weight on this device: of its part when it is spread, of its 8 bits and scales when it has them."""
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    return sum(part.nbytes for part in ((weight.qdata, weight.scale) if hasattr(weight, "qdata") else (weight,)))


def matmul_ceiling(device: str, dtype: torch.dtype, size: int) -> float:
    """FLOP per second of a square matrix product in the training precision, the best of ten."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        torch.mm(a, b)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def random_batch(shape: Shape, batch_size: int, length: int, device: str) -> Sequences:
    """Tokens drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab, (batch_size, length), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((batch_size, 1), IGNORE)], dim=1)
    return Sequences(ids.to(device), labels.to(device), None, batch_size * (length - 1), batch_size * length)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(prog="golinear bench train", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose shape")
    parser.add_argument("--recipe", default="gdn 56+8", help="one, or several separated by commas to train together")
    parser.add_argument("--sequence-length", default="4096", help="comma-separated numbers of tokens")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--objective", default="ce", choices=OBJECTIVES)
    parser.add_argument("--steps", type=int, default=10, help="timed steps; the median counts")
    parser.add_argument(
        "--checkpoint-activations", type=float, nargs="?", const=1.0, default=0.0, metavar="SHARE",
        help="make them again in the backward pass, on both sides, in all layers or a share of them such as 0.25",
    )
    parser.add_argument("--backbone", default="full", choices=BACKBONES, help="int8: the frozen layers in 8 bits")
    parser.add_argument("--shard-weights", action="store_true", help="under torchrun: spread them over the GPUs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a dry run: a tiny shape, 128 tokens, three steps")
    parser.add_argument("--output", help="write the rows as JSON")
    options = parser.parse_args(argv)
    shape = TINY if options.tiny else resolve(options.model).shape
    lengths = [128] if options.tiny else [int(n) for n in options.sequence_length.split(",")]
    name = "a tiny model" if options.tiny else options.model
    check_backbone(options.backbone)
    with started_by_torchrun(options.device) as (me, device):
        check_batch(options.batch_size, me.size)
        if options.shard_weights and (me.size == 1 or options.backbone != "full"):
            parser.error("--shard-weights is for several ranks (torchrun) and the full backbone")
        rows = run(
            shape, [Recipe.parse(text) for text in options.recipe.split(",")], device=device, lengths=lengths,
            batch_size=options.batch_size, objective=options.objective, steps=3 if options.tiny else options.steps,
            ceiling_size=256 if options.tiny else 8192, recompute=options.checkpoint_activations,
            sharded=options.shard_weights, backbone=options.backbone,
        )  # fmt: skip
        if me.leads:
            show(f"training {name} on {options.device}", rows, device=device, output=options.output)
        else:
            list(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
