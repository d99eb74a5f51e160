"""How a task becomes numbers: lm-eval's items averaged over documents, and windows of text. Imports torch."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.attribution import refusal, variants
from linear_core.evaluate.offline import redirect
from linear_core.evaluate.run import Measured
from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import TASKS, sample_items

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class DataError(Exception):
    """A task's data, base model or room for its prompts is lacking: the reason for a missing score."""


def score_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskSpec, base: Any,
    switches: dict[str, Any] | None,
) -> list[Measured]:  # fmt: skip
    """Perplexity (exp of the mean negative log-likelihood a token), agreement with the base, attribution or diagnostics,
    on held-out windows."""
    import torch

    from linear_core.evaluate import windows as w
    from linear_core.ranks import sharing

    if task.name == "attribution" and (reason := refusal(model)):
        raise DataError(reason)
    if task.name == "diagnostics" and not hasattr(model, "recipe"):
        raise DataError("diagnostics measures the error of a linearized model; the base has none")
    try:
        with redirect():
            windows = w.heldout_windows(task, tokenizer)
    except (OSError, ConnectionError) as error:
        raise DataError(f"{TASKS[task.name].hub} could not be loaded: {error}") from error
    details: dict[str, Any] = {"items": list(windows.names), "windows": windows.key, "length": windows.tokens.shape[1]}

    ranks = sharing(model)

    def over(work: Callable[[w.Windows], tuple[Tensor, ...]]) -> list[Tensor]:
        """What ``work`` makes of all windows, each rank of its own."""
        own = windows[ranks.block(len(windows.names))]
        parts = ranks.gather(lambda: work(own) if own.names else ())
        return [torch.cat(each) for each in zip(*(part for part in parts if part))]

    def measured(metric: str, values: Any, value: float, stderr: float | None) -> Measured:
        means = [float(v) for v in values.double().mean(1)]
        return Measured(metric, value, stderr, values.numel(), means, {**details, "values": means})

    if task.name == "perplexity":
        (losses,) = over(lambda own: (w.token_losses(model, own, switches),))
        mean, stderr = w.mean_of(losses)
        value = math.exp(mean) if mean < 700 else math.inf
        return [measured("perplexity", losses, value, value * stderr if stderr is not None else None)]
    if task.name == "attribution":
        half = windows.tokens.shape[1] // 2
        found = variants(half)
        by_path = over(lambda own: tuple(w.token_losses(model, own, switches) for switches in found.values()))
        return [measured(*row) for row in _paths(dict(zip(found, by_path)), half)]
    if task.name == "diagnostics":
        return _diagnosed(model, windows)
    same, kl = over(lambda own: w.agreement(model, w.base_reference(model, own, base), own, switches))
    return [measured("top1", same, *w.mean_of(same)), measured("kl", kl, *w.mean_of(kl))]


def _diagnosed(model: PreTrainedModel, windows: Any) -> list[Measured]:
    """Mean nMSE, key concentration and projection residual over layers; ``details["map"]``: nMSE by layer and token."""
    from linear_core.diagnostics import diagnose

    found = diagnose(model, windows.tokens)
    assert found.nmse is not None
    details = {"map": found.map(), "bins": found.bins, "windows": windows.key}
    means = {"nmse": found.nmse, "concentration": found.concentration, "residual": found.residual}
    return [
        Measured(name, math.fsum(values) / len(values), None, found.tokens, (), details if name == "nmse" else {})
        for name, values in means.items()
    ]


def score_speed(model: PreTrainedModel, task: TaskSpec) -> list[Measured]:
    """Prefill and decoding by the clock; a missing score when the prompt does not fit."""
    from linear_core.device import nvidia_gpus
    from linear_core.evaluate.latency import OutOfRoom, score_latency

    if nvidia_gpus()[0] and model.device.type == "cpu":
        raise DataError("this machine has a GPU and the model is on the CPU: its speed would be taken for the GPU's")
    try:
        return score_latency(model, task)
    except OutOfRoom as error:
        raise DataError(str(error)) from error


def _paths(losses: dict[str, Tensor], half: int) -> Iterator[tuple[str, Tensor, float, float | None]]:
    """What the state saves in nats a token (exact path alone − hybrid), then the perplexity of each path.

    ``frozen``: the read is zero from the middle of a window on; only the tokens behind it count.
    """
    from linear_core.evaluate import windows as w

    saved = losses["exact"] - losses["hybrid"]
    yield "state_nats", saved, *w.mean_of(saved)
    for name in ("exact", "linear", "frozen"):
        values = losses[name][:, half - 1 :] if name == "frozen" else losses[name]
        mean, stderr = w.mean_of(values)
        value = math.exp(min(mean, 700.0))
        yield name, values, value, value * stderr if stderr is not None else None


def score_harness(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskSpec, batch_size: int | str,
    switches: dict[str, Any] | None,
) -> list[Measured]:  # fmt: skip
    """One lm-eval call for one task; its results averaged over the items (MMLU: over documents, not subjects)."""
    from lm_eval.evaluator import evaluate

    from linear_core.evaluate.harness import PrefixLM, TruncationError
    from linear_core.ranks import sharing

    known = TASKS[task.name]
    with tamed():
        loaded = load_tasks(task, tokenizer)
    sizes = {name: len(each.eval_docs) for name, each in loaded.items()}
    chosen = sample_items(sizes, task.limit if known.kind != "ruler" else None, task.seed)
    lm = PrefixLM(
        model,
        tokenizer,
        batch_size=batch_size,
        switches=switches,
        settled=all_found if known.kind == "ruler" else None,
        ranks=sharing(model),
    )
    everything = all(len(items) == sizes[name] for name, items in chosen.items())
    try:
        with tamed():
            out = evaluate(
                lm=lm, task_dict={"tasks": {name: loaded[name] for name in chosen}},
                samples=None if everything else chosen,
                bootstrap_iters=0, log_samples=True,
            )  # fmt: skip
    except TruncationError as error:
        raise DataError(str(error)) from error
    rows = [(name, row) for name in chosen for row in out["samples"][name]]
    details = _details(rows, lm, len(loaded) > 1)
    return [_measured(metric, rows, details if metric == known.metrics[0] else {}) for metric in known.metrics]


@contextlib.contextmanager
def tamed() -> Iterator[None]:
    """lm-eval without a line and a bar for every subject (errors come through), and without compiling one template
    for every document anew: that is 93% of the time it takes to build MMLU's prompts.
    """
    import lm_eval.api.task
    import lm_eval.utils

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    bars, environment = lm_eval.api.task.tqdm, lm_eval.utils.env
    compile_template = environment.from_string
    lm_eval.api.task.tqdm = partial(bars, disable=True)
    environment.from_string = cache(compile_template)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bars
        environment.from_string = compile_template
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def load_tasks(task: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """lm-eval's task objects (one, or one a subject) with data, shots and seed. Raises DataError without data."""
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    known = TASKS[task.name]
    folder = Path(lm_eval.tasks.__file__).parent / known.folder
    manager = TaskManager(include_defaults=False, include_path=str(folder))  # the whole index takes 9 s
    spec: str | dict[str, Any] = known.harness
    if known.kind == "ruler":
        spec = {"group": "golinear", "task": [_ruler_config(task, tokenizer)]}
    try:
        with redirect():
            loaded = manager.load([spec])["tasks"]
    except (OSError, ConnectionError) as error:
        raise DataError(f"{known.hub} could not be loaded: {error}") from error
    for each in loaded.values():
        each.set_config(key="num_fewshot", value=known.shots if task.shots is None else task.shots)
        each.set_fewshot_seed(seed=1234 + task.seed)
    return loaded


def _ruler_config(task: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The task with our data and one metric, ``acc``: the share of its answers that the harness finds in the text."""
    import datasets

    from linear_core.evaluate.ruler import LengthError, samples

    try:
        rows = samples(task, tokenizer)
    except LengthError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        raise DataError(f"{TASKS[task.name].hub} could not be loaded: {error}") from error
    return {
        "task": TASKS[task.name].harness,
        "custom_dataset": lambda **kwargs: {"test": datasets.Dataset.from_list(rows)},
        "process_results": _ruler_score,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _ruler_score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Share of the reference answers found in the text; for the two QA tasks one of them is enough, as in lm-eval."""
    from lm_eval.tasks.ruler import common_utils

    any_of = doc["gen_prefix"] == "Answer:"
    score = (common_utils.process_results_part if any_of else common_utils.process_results)(doc, results)
    return {"acc": score[str(doc["max_length"])]}


def all_found(request: Any, text: str) -> bool:
    """Whether every reference answer is in the text already: RULER's score can then no longer change."""
    found = text.lower()
    return all(answer.lower() in found for answer in request.doc["outputs"])


def _details(rows: list[tuple[str, dict[str, Any]]], lm: Any, grouped: bool) -> dict[str, Any]:
    """Per item: which one, lm-eval's answers, the choice made. No documents and prompts: the source has them."""
    details: dict[str, Any] = {
        "items": [f"{name}:{row['doc_id']}" if grouped else row["doc_id"] for name, row in rows],
        "doc_hash": [row["doc_hash"][:16] for _, row in rows],
        "responses": [[response[0] for response in row["resps"]] for _, row in rows],
        "tokens_forwarded": lm.tokens_forwarded, "tokens_asked": lm.tokens_asked,
    }  # fmt: skip
    answers = [row["filtered_resps"] for _, row in rows]
    if all(len(a) > 1 for a in answers):
        details["predictions"] = [scores.index(max(scores)) for scores in ([value for value, _ in a] for a in answers)]
    return details


def _measured(metric: str, rows: list[tuple[str, dict[str, Any]]], details: dict[str, Any]) -> Measured:
    """Mean over items with its standard error; perplexities weigh items as lm-eval's own aggregation does."""
    raw = [row[metric] for _, row in rows]
    if isinstance(raw[0], (tuple, list)):  # (log-likelihood, weight): word and byte perplexity, bits per byte
        total, weight = sum(v for v, _ in raw), sum(n for _, n in raw)
        value = -total / weight / math.log(2) if metric == "bits_per_byte" else math.exp(-total / weight)
        values = [v / n for v, n in raw]
        return Measured(metric, value, None, len(raw), values, {**details, "values": values})
    values = [float(v) for v in raw]
    mean = math.fsum(values) / len(values)
    spread = math.fsum((v - mean) ** 2 for v in values)
    stderr = math.sqrt(spread / (len(values) - 1) / len(values)) if len(values) > 1 else None
    if metric == "perplexity":
        value = math.exp(-mean) if mean > -700 else math.inf
        return Measured(
            metric,
            value,
            value * stderr if stderr is not None else None,
            len(values),
            values,
            {**details, "values": values},
        )
    return Measured(metric, mean, stderr, len(values), values, {**details, "values": values})
