"""Our lm-eval model against the harness's own on the same items: wall time, tokens forwarded, largest difference.

    golinear bench evaluate --model smollm2-135m --tasks mmlu,lambada_openai --limit 40
    golinear bench evaluate --model smollm2-135m --recipe "gdn 56+8" --parameters new_parameters.safetensors

Both score the same requests of the same items on the same model in one process; loading data and building prompts is in
neither time, tokenisation in both. ``HFLM`` runs with ``batch_size=auto``, on the CPU with 4: its trial would take the
largest batch that memory holds, which is slower there.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from linear_core.bench.report import show
from linear_core.models import load, load_tokenizer, resolve
from linear_core.recipe import Recipe


def run(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Any],
    *,
    part: str = "",
    only_ours: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[dict[str, Any]]:
    """Two rows a task, HFLM's and ours. tasks: TaskSpecs of the harness's kinds.

    part: only subtasks with this in their name. clock: of the seconds. Rows: task, what, seconds, items, tokens_asked and tokens_forwarded
    (ours), times_hflm, largest_difference (of a log-likelihood), other_answers (greedy flags or texts that differ).
    """
    from linear_core.evaluate.harness import PrefixLM
    from linear_core.evaluate.measures import all_found, load_tasks, tamed
    from linear_core.evaluate.tasks import TASKS, sample_items

    for task in tasks:
        with tamed():
            loaded = {name: each for name, each in load_tasks(task, tokenizer).items() if part in name}
            limit = task.limit if TASKS[task.name].kind != "ruler" else None
            chosen = sample_items({name: len(each.eval_docs) for name, each in loaded.items()}, limit, task.seed)
            for name, items in chosen.items():
                loaded[name].build_all_requests(samples=items, rank=0, world_size=1)
        requests = [request for name in chosen for request in loaded[name].instances]
        kind = requests[0].request_type
        theirs: list[Any] | None = None
        if not only_ours:
            theirs, seconds = _timed(_hflm(model, tokenizer), kind, requests, clock)
            yield {"task": task.label, "what": "HFLM", "items": len(requests), "seconds": seconds}
        settled = all_found if TASKS[task.name].kind == "ruler" else None
        lm = PrefixLM(model, tokenizer, settled=settled)
        ours, own = _timed(lm, kind, requests, clock)
        yield {
            "task": task.label, "what": "golinear", "items": len(requests), "seconds": own,
            "tokens_asked": lm.tokens_asked, "tokens_forwarded": lm.tokens_forwarded,
            **({} if theirs is None else {"times_hflm": seconds / own, **_differences(ours, theirs)}),
        }  # fmt: skip


def _hflm(model: Any, tokenizer: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    on_gpu = model.device.type == "cuda"
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size="auto" if on_gpu else 4)


def _timed(lm: Any, kind: str, requests: list[Any], clock: Callable[[], float]) -> tuple[list[Any], float]:
    started = clock()
    answers = getattr(lm, kind)(requests, disable_tqdm=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return answers, clock() - started


def _differences(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Texts are compared as far as ours go: generation stops once its score is settled."""
    if isinstance(ours[0], str):
        return {"other_answers": sum(not b.startswith(a) for a, b in zip(ours, theirs))}
    return {
        "largest_difference": max(abs(a[0] - b[0]) for a, b in zip(ours, theirs)),
        "other_answers": sum(a[1] != b[1] for a, b in zip(ours, theirs)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and show."""
    from linear_core.evaluate.run import check_task
    from linear_core.evaluate.scores import TaskSpec
    from linear_core.evaluate.tasks import TASKS

    parser = argparse.ArgumentParser(prog="golinear bench evaluate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipe", default="", help="linearize first; default: the base model")
    parser.add_argument("--parameters", default="", help="trained new parameters of that recipe (safetensors)")
    parser.add_argument("--tasks", default="mmlu,lambada_openai", help="comma-separated")
    parser.add_argument("--limit", type=int, help="items a task")
    parser.add_argument("--part", default="", help="only subtasks with this in their name, e.g. anatomy of mmlu")
    parser.add_argument("--length", type=int, default=1024, help="of RULER prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="", help="float32 or bfloat16; default: bfloat16 on CUDA")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time of one thread instead of wall time, for a machine that others use",
    )
    parser.add_argument("--only-ours", action="store_true", help="leave HFLM out")
    parser.add_argument("--output", help="write the rows as JSON")
    options = parser.parse_args(argv)
    specs = []
    for name in options.tasks.split(","):
        ruler = name in TASKS and TASKS[name].kind == "ruler"
        specs.append(TaskSpec(name=name, limit=options.limit, length=options.length if ruler else None))
        check_task(specs[-1])
        if TASKS[name].kind == "own":
            raise ValueError(f"{name} does not go through lm-eval; allowed: mmlu, lambada_openai, RULER tasks, …")
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.cpu_time:
        torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    base = resolve(options.model)
    model, tokenizer = load(base, device=options.device, dtype=dtype), load_tokenizer(base)
    if options.recipe:
        from linear_core.convert import convert, load_new_parameters

        model = convert(model, Recipe.parse(options.recipe)).eval()
        if options.parameters:
            load_new_parameters(model, options.parameters)
    rows = run(model, tokenizer, specs, part=options.part, only_ours=options.only_ours, clock=clock)
    show(f"Evaluation of {options.model} {options.recipe}", rows, device=options.device, output=options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
