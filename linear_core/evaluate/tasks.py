"""What can be measured: one line a task, as data. Imports no torch, no lm-eval, no datasets.

A task is scored by lm-eval's own definition (``folder`` is where its YAML lies inside lm_eval/tasks) or, for
``perplexity``, ``agreement``, ``attribution`` and ``diagnostics``, on ``linear_core.evaluate.windows``; ``latency`` by the clock.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from linear_core.evaluate.scores import TaskSpec


@dataclass(frozen=True, kw_only=True)
class Task:
    """How one task is run and read.

    ``metrics``: what lm-eval calls them, the first is the one a table shows. ``chance``: the value of the first metric
    that guessing reaches, None where there is no such thing. ``files``: what serves it from ``GOLINEAR_DATA``, all
    needed; empty: it makes its own data. ``hub``: the data set otherwise. ``published``: its column in the reference
    table. ``min_length``: the shortest prompt at which its generator works (RULER), 0 for tasks without a length.
    """

    name: str
    kind: str  # own, harness, ruler, speed
    harness: str = ""  # lm-eval's task or group name
    folder: str = ""
    shots: int = 0
    metrics: tuple[str, ...] = ("acc",)
    chance: float | None = None
    files: tuple[str, ...] = ()
    hub: str = ""
    published: str = ""
    min_length: int = 0
    generator: str = ""  # RULER: module:function:where its sample count is set


def _ruler(
    name: str, generator: str, *, min_length: int, published: str = "", essays: bool = False,
    files: tuple[str, ...] = (), hub: str = "",
) -> Task:  # fmt: skip
    if generator == "niah":
        generator = f"niah_utils:{name}:generate_samples"
    if essays:
        files, hub = ("ruler_essays_pd.jsonl.gz",), "baber/paul_graham_essays"
    harness = name if name.startswith("niah") else f"ruler_{name}"
    return Task(name=name, kind="ruler", harness=harness, folder="ruler", files=files, hub=hub,
                published=published and f"ruler_{published}", min_length=min_length, generator=generator)  # fmt: skip


TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        Task(name="perplexity", kind="own", metrics=("perplexity",), files=("heldout_text.jsonl.gz",),
             hub="EleutherAI/wikitext_document_level"),
        Task(name="agreement", kind="own", metrics=("top1", "kl"), files=("heldout_text.jsonl.gz",),
             hub="EleutherAI/wikitext_document_level"),
        Task(name="attribution", kind="own", metrics=("state_nats", "exact", "linear", "frozen"),
             files=("heldout_text.jsonl.gz",), hub="EleutherAI/wikitext_document_level"),
        Task(name="diagnostics", kind="own", metrics=("nmse", "concentration", "residual"),
             files=("heldout_text.jsonl.gz",), hub="EleutherAI/wikitext_document_level"),
        Task(name="latency", kind="speed", metrics=("tokens_per_s", "prefill_tokens_per_s", "cache_mib")),
        Task(name="lambada_openai", kind="harness", harness="lambada_openai", folder="lambada",
             metrics=("acc", "perplexity"), files=("lambada_test.jsonl.gz",), hub="EleutherAI/lambada_openai",
             published="lambada_openai"),
        Task(name="mmlu", kind="harness", harness="mmlu", folder="mmlu/default", shots=5, chance=0.25,
             files=("mmlu_dev.jsonl.gz", "mmlu_test.jsonl.gz"), hub="cais/mmlu", published="mmlu_5shot"),
        Task(name="piqa", kind="harness", harness="piqa", folder="piqa", metrics=("acc", "acc_norm"), chance=0.5,
             hub="baber/piqa", published="piqa"),
        Task(name="arc_easy", kind="harness", harness="arc_easy", folder="arc", metrics=("acc", "acc_norm"),
             chance=0.25, hub="allenai/ai2_arc", published="arc_easy"),
        Task(name="arc_challenge", kind="harness", harness="arc_challenge", folder="arc",
             metrics=("acc_norm", "acc"), chance=0.25, hub="allenai/ai2_arc", published="arc_challenge_norm"),
        Task(name="hellaswag", kind="harness", harness="hellaswag", folder="hellaswag", metrics=("acc_norm", "acc"),
             chance=0.25, hub="Rowan/hellaswag", published="hellaswag_norm"),
        Task(name="winogrande", kind="harness", harness="winogrande", folder="winogrande", chance=0.5,
             hub="allenai/winogrande", published="winogrande"),
        Task(name="wikitext", kind="harness", harness="wikitext", folder="wikitext",
             metrics=("word_perplexity", "byte_perplexity", "bits_per_byte"), hub="EleutherAI/wikitext_document_level"),
        _ruler("niah_single_1", "niah", published="niah_single_1", min_length=256),
        _ruler("niah_single_2", "niah", published="niah_single_2", min_length=1024, essays=True),
        _ruler("niah_single_3", "niah", published="niah_single_3", min_length=1024, essays=True),
        _ruler("niah_multikey_1", "niah", published="multikey", min_length=1024, essays=True),
        _ruler("niah_multikey_2", "niah", min_length=512),
        _ruler("niah_multikey_3", "niah", min_length=1024),
        _ruler("niah_multivalue", "niah", published="multivalue", min_length=1024, essays=True),
        _ruler("niah_multiquery", "niah", published="multiquery", min_length=1024, essays=True),
        _ruler("vt", "vt_utils:get_vt_dataset:sys_vartrack_w_noise_random", published="vt", min_length=1024),
        _ruler("cwe", "cwe_utils:get_cw_dataset:sys_word_pair_random", published="cwe", min_length=1024),
        _ruler("fwe", "fwe_utils:fwe_download:sys_kwext", published="fwe", min_length=512),
        _ruler("qa_squad", "qa_utils:get_squad:generate_samples", published="qa_squad", min_length=1024,
               files=("squad_v2_dev_half.json.gz",), hub="rajpurkar.github.io/SQuAD-explorer"),
        _ruler("qa_hotpot", "qa_utils:get_hotpotqa:generate_samples", published="qa_hotpot", min_length=4096,
               files=("hotpot_dev_distractor_first100.json.gz",), hub="namlh2004/hotpotqa"),
    )
}  # fmt: skip

RULER = tuple(name for name, task in TASKS.items() if task.kind == "ruler")
REASONING = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande")
S_NIAH = ("niah_single_1", "niah_single_2", "niah_single_3")
RULER_PAPER = ("niah_multikey_1", "niah_multiquery", "niah_multivalue", "cwe", "fwe", "qa_hotpot", "qa_squad", "vt")
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": RULER, "ruler_paper": RULER_PAPER, "s_niah": S_NIAH, "reasoning": REASONING,
    "paper": ("mmlu", "lambada_openai", *REASONING),
}  # fmt: skip
MOST_DIAGNOSED = 2048  # tokens of a diagnosed window: the Gram matrix of its keys is T × T a head
DEFAULT_WINDOW = 512  # tokens of a perplexity or agreement window when the task names no length


def check_task(task: TaskSpec) -> None:
    """Refuses a task that cannot be run as asked. Raises ValueError that names what is allowed."""
    if task.name not in TASKS:
        raise ValueError(f"task {task.name!r} is not known; allowed: {', '.join(TASKS)}; groups: {', '.join(GROUPS)}")
    known = TASKS[task.name]
    for field, least in (("limit", 1), ("shots", 0), ("length", 1), ("seed", 0)):
        value = getattr(task, field)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{task.name}: {field} must be a whole number ≥ {least}, not {value!r}")
    if known.kind == "own":
        if task.shots:
            raise ValueError(f"{task.name} has no shots; leave shots out")
        if min(task.length or DEFAULT_WINDOW, task.limit or DEFAULT_WINDOW) < 2:
            raise ValueError(f"{task.name}: limit and length count tokens and must be at least 2")
        if task.name == "diagnostics" and (task.length or 0) > MOST_DIAGNOSED:
            raise ValueError(f"diagnostics takes windows of at most {MOST_DIAGNOSED} tokens, not {task.length}")
    elif known.kind == "speed":
        if task.length is None or task.limit is not None or task.shots:
            raise ValueError("latency takes a length in tokens and nothing else: write latency@2048")
    elif known.kind == "ruler":
        if task.length is None:
            raise ValueError(f"{task.name} needs a prompt length in tokens, e.g. length 4096")
        if task.length < known.min_length:
            raise ValueError(f"{task.name} can be made from length {known.min_length} on, not {task.length}")
        if task.shots:
            raise ValueError(f"{task.name} has no shots of its own choosing; leave shots out")
    elif task.length is not None:
        allowed = "RULER tasks, latency, perplexity, agreement, attribution and diagnostics"
        raise ValueError(f"{task.name} has no length; only {allowed} take one")


def sample_items(sizes: Mapping[str, int], limit: int | None, seed: int) -> dict[str, list[int]]:
    """Which items a limit takes: a seeded systematic sample over all parts of a task, in proportion to their sizes.

    sizes: items of each part (a subject, a document). Each item is equally likely; two parts of one size get the same
    number within one. Returns ascending item numbers a part, parts without items left out; None takes everything.
    """
    total = sum(sizes.values())
    if limit is None or limit >= total:
        return {name: list(range(size)) for name, size in sizes.items() if size}
    chance = random.Random(f"golinear sample {seed}")
    order = [(name, i) for name, size in sizes.items() for i in chance.sample(range(size), size)]
    start = chance.random()
    chosen: dict[str, list[int]] = {}
    for k in range(limit):
        name, item = order[int((k + start) * total / limit)]
        chosen.setdefault(name, []).append(item)
    return {name: sorted(items) for name, items in chosen.items()}
