"""Every spelling in which a list or a number can arrive from a command line, in one place. Imports no torch.

Prefect's ``--param`` parses JSON first: ``["gdn"]`` comes as a list, ``['gdn']`` and ``gdn,gla`` as one string, ``NaN``
as nan.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import GROUPS, TASKS
from linear_core.settings import parse_count

LAYER_LIST = re.compile(r"list:\d+(,\d+)*")  # one word: layers that keep softmax attention


def items(value: Any, name: str) -> list[str]:
    """A list of words from one word, a comma list, a JSON list, or a list of any of these. Keeps order, drops repeats.

    ``"gdn"`` · ``"gdn,gla"`` · ``["gdn", "gla"]`` · ``'["gdn","gla"]'`` · ``"['gdn', 'gla']"`` · ``["gdn,gla"]``.
    Raises ValueError, showing the right spelling, for an empty list, nested lists and anything that is no word.
    """
    comma, quoted = _example(name)
    hint = f"{name}={comma} or {name}='[{quoted}]'"
    found: list[str] = []
    for part in _parts(value, name, hint):
        kept = LAYER_LIST.sub(lambda found: found[0].replace(",", "\0"), part)
        words = [word.replace("\0", ",").strip().strip("'\"") for word in kept.split(",")]
        if not all(words):
            raise ValueError(f"{name}: {value!r} has an empty item; write {hint}")
        found += words
    if not found:
        raise ValueError(f"{name} is empty; write {hint}")
    return list(dict.fromkeys(found))


def _example(name: str) -> tuple[str, str]:
    examples = {
        "models": ("smollm2-135m,qwen3-0.6b-base", '"smollm2-135m","qwen3-0.6b-base"'),
        "mechanisms": ("gla,gdn", '"gla","gdn"'),
        "budgets": ("56+8,64+0", '"56+8","64+0"'),
        "adaptations": ("none,conv", '"none","conv"'),
        "seeds": ("1,2,3", "1,2,3"),
        "tasks": ("lambada_openai,mmlu", '"lambada_openai","mmlu"'),
    }
    return examples.get(name, ("a,b", '"a","b"'))


def _parts(value: Any, name: str, hint: str) -> list[str]:
    if isinstance(value, str):
        text = value.strip()
        if text[:1] != "[":
            return [text]
        if text[-1:] != "]":
            raise ValueError(f"{name}: {value!r} opens a list and does not close it; write {hint}")
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            parsed = text[1:-1]  # ['gdn', 'gla'] and [gdn,gla] arrive as text
            if "[" in parsed:
                raise ValueError(f"{name}: {value!r} is a list in a list; write {hint}") from None
            return [parsed]
        return _parts(parsed, name, hint)
    if isinstance(value, bool) or value is None or isinstance(value, dict):
        raise ValueError(f"{name}: {value!r} is not a list of words; write {hint}")
    if isinstance(value, (int, float)):
        return [str(value)]
    if isinstance(value, Iterable):
        parts = list(value)
        if any(isinstance(part, (list, tuple, dict, bool)) or part is None for part in parts):
            raise ValueError(f"{name}: {value!r} has an item that is no word; write {hint}")
        return [str(part) for part in parts]
    raise ValueError(f"{name}: {value!r} is not a list of words; write {hint}")


def whole_numbers(value: Any, name: str, *, minimum: int = 0) -> list[int]:
    """As ``items``, each a whole number ≥ ``minimum``. Raises ValueError on 1.5, nan, inf, 1e3 and words."""
    found = []
    for word in items(value, name):
        if not re.fullmatch(r"\d+", word) or int(word) < minimum:
            raise ValueError(f"{name}: {word!r} is not a whole number ≥ {minimum}; write {name}={_example(name)[0]}")
        found.append(int(word))
    return list(dict.fromkeys(found))


def number(value: Any, name: str, *, minimum: float = 0.0) -> float:
    """One finite number ≥ ``minimum``. Raises ValueError on nan, inf (``12e4567`` arrives as one), bools and words."""
    try:
        parsed = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed) or parsed < minimum:
        raise ValueError(f"{name} must be a finite number ≥ {minimum:g}, not {value!r}")
    return parsed


def tokens(value: Any, name: str = "tokens") -> int:
    """``"10.24M"``, ``4096``, ``4096.0`` → whole number of tokens above 0."""
    if isinstance(value, float) and math.isfinite(value) and value == round(value):
        value = round(value)
    try:
        return parse_count(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def tasks(value: Any, *, limit: Any = None, lengths: Any = None, seed: int = 0) -> tuple[TaskSpec, ...]:
    """``"lambada_openai,mmlu:100,niah_single_1@512:8"`` → TaskSpecs; ``[]`` or ``""`` → none.

    One task is ``name[@length][:limit]``; a name may be a group (``paper``, ``ruler``). ``limit`` is a number for all
    tasks without their own, or a mapping or comma list ``lambada_openai=40,niah_single_1=8``; ``lengths`` multiplies
    the RULER tasks and latency that name no length of their own; of a group, the tasks that can be made at a length.
    Which names exist is checked by ``linear_core.evaluate.run.check_task``. Raises ValueError with the right spelling.
    """
    if value is None or value == "" or value == [] or value == ():
        return ()
    limits, default = _limits(limit)
    all_lengths = [] if lengths in (None, "", [], ()) else [_length(word) for word in items(lengths, "lengths")]
    specs: list[TaskSpec] = []
    for word in items(value, "tasks"):
        match = re.fullmatch(r"([A-Za-z0-9_.-]+?)(?:@(\d+[kK]?))?(?::([\w.]+))?", word)
        if match is None:
            raise ValueError(
                f"task {word!r} is not of the form name[@length][:limit]; write lambada_openai, niah_single_1@4096:8"
            )
        name, length, own = match[1], match[2], match[3]
        count = tokens(own, f"limit of task {word!r}") if own else limits.get(name, default)
        made: list[TaskSpec] = []
        for task in GROUPS.get(name, (name,)):
            kind = TASKS[task].kind if task in TASKS else ""
            spans: list[int | None] = [_length(length)] if length else [*all_lengths] if kind in ("ruler", "speed") else []
            asked = count if own or kind != "speed" else None  # a limit for all is of items; speed has none
            made += [
                TaskSpec(name=task, limit=asked, length=span, seed=seed) for span in spans or [None]
                if not (name in GROUPS and kind == "ruler" and span and span < TASKS[task].min_length)
            ]  # fmt: skip
        if not made:
            least = min(TASKS[task].min_length for task in GROUPS[name])
            raise ValueError(f"task {word!r}: none of its tasks can be made so short; allowed: lengths from {least} on")
        specs += made
    return tuple(dict.fromkeys(specs))


def _length(text: str) -> int:
    """``"4096"``, ``"4k"`` (4,096) → tokens. Raises ValueError on anything else."""
    if not re.fullmatch(r"[1-9]\d*[kK]?", text):
        raise ValueError(f"{text!r} is not a prompt length in tokens; write lengths=1024,4096")
    return int(text[:-1]) * 1024 if text[-1] in "kK" else int(text)


def _limits(limit: Any) -> tuple[dict[str, int], int | None]:
    if limit is None or limit == "":
        return {}, None
    if isinstance(limit, dict):
        return {str(k): tokens(v, "limit") for k, v in limit.items()}, None
    own: dict[str, int] = {}
    default = None
    for word in items(limit, "limit"):
        name, equals, count = word.rpartition("=")
        if equals:
            own[name] = tokens(count, "limit")
        else:
            default = tokens(count, "limit")
    return own, default
