"""RULER's data, made by lm-eval's own generators: any length, as many samples as asked for, seeded, once a process.

Importing this module imports lm-eval's generators' needs only inside functions.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import io
import itertools
import logging
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from linear_core.evaluate.offline import hub_reachable, read_json, read_rows, task_files
from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import TASKS, sample_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
_NEEDLES = "lm_eval.tasks.ruler.prepare_niah"
MOST_KEPT = 16  # sets of samples kept in a process, the oldest goes first
HARNESS_SAMPLES = 500  # what lm-eval makes at any length
_made: dict[Any, list[dict[str, Any]]] = {}
_lock = threading.Lock()


class LengthError(ValueError):
    """No prompt of the length asked for can be made with this tokenizer."""


def samples(task: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The first ``task.limit`` samples of the seeded stream that lm-eval's generator makes (all 500 without a limit).

    A limit takes the first ones since every sample is drawn independently: a shorter run is a part of a longer one and
    nothing is made in vain (of the QA tasks' questions it takes a seeded sample). Seed 0 gives lm-eval's own samples.
    Raises LengthError when no prompt of this length can be made.
    """
    most = min(task.limit or HARNESS_SAMPLES, HARNESS_SAMPLES)
    key = (task.name, task.length, task.seed, most, tokenizer, tuple(task_files(TASKS[task.name]) or ()))
    with _lock:  # the generators draw from the global random streams
        if key not in _made:
            asked, rows = most, _make(task, tokenizer, most)
            # it skips samples that come out too long; of questions there are no others
            while len(rows) < most and asked < HARNESS_SAMPLES and not task.name.startswith("qa"):
                asked = min(2 * asked, HARNESS_SAMPLES)
                rows = _make(task, tokenizer, asked)
            while len(_made) >= MOST_KEPT:
                del _made[next(iter(_made))]
            _made[key] = rows[:most]
        return _made[key]


def _make(task: TaskSpec, tokenizer: PreTrainedTokenizerBase, most: int) -> list[dict[str, Any]]:
    module_name, function, counter = TASKS[task.name].generator.split(":")
    module = _fresh(module_name)
    with _seeded(task.seed):
        _check_room(task, tokenizer, module)
    module = _fresh(module_name)  # the check has drawn from the first one's stream
    module.get_tokenizer = lambda *args, **kwargs: tokenizer  # type: ignore[attr-defined]
    files = task_files(TASKS[task.name])
    if files and module_name == "qa_utils":
        module.download_json = lambda url: read_json(files[0])  # type: ignore[attr-defined]
    if files and module_name == "niah_utils":
        original = module.get_haystack
        module.get_haystack = lambda type_haystack: (  # type: ignore[attr-defined]
            essay_words(files[0]) if type_haystack == "essay" else original(type_haystack=type_haystack)
        )
    generate: Callable[..., Any] = getattr(module, counter)

    def fewer(*args: Any, num_samples: int = HARNESS_SAMPLES, **kwargs: Any) -> Any:
        if "qas" in kwargs:  # its questions lie in the order of their articles: a limit takes a seeded sample of them
            usual = {"all": min(HARNESS_SAMPLES, len(kwargs["qas"]))}
            kwargs["qas"] = [kwargs["qas"][i] for i in sample_items(usual, most, task.seed)["all"]]
            num_samples = len(kwargs["qas"])
        return generate(*args, num_samples=min(num_samples, most), **kwargs)

    setattr(module, counter, fewer)
    with _seeded(task.seed), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            data = getattr(module, function)(max_seq_lengths=[task.length], tokenizer="given")
        except ValueError as error:
            raise LengthError(f"{task.name}: {error}") from error
    return [dict(row) for row in data["test"]]


def _check_room(task: TaskSpec, tokenizer: PreTrainedTokenizerBase, module: ModuleType) -> None:
    """Two of lm-eval's generators try for ever when their smallest prompt does not fit. Raises LengthError instead."""

    def tokens(text: str) -> int:
        return len(tokenizer(text)["input_ids"])

    if task.name == "vt":
        example = tokens(module.generate_input_output(5, 1, 4, is_icl=True)[0])
        smallest = tokens(module.generate_input_output(10, 1, 4)[0]) + example + 40
        if example + 40 > 500:  # the generator's own limit for its worked example
            raise LengthError(
                f"vt: its worked example takes {example} tokens of this tokenizer, and may take 500 with its answer"
            )
    elif task.name == "cwe":
        smallest = tokens(module.generate_input_output(10, task.length)[1]) + 120
    else:
        return
    if smallest > (task.length or 0):
        raise LengthError(
            f"{task.name}: the smallest prompt takes about {smallest} tokens; allowed: a longer length than {task.length}"
        )


def essay_words(path: Path) -> list[str]:
    """The haystack of the essay tasks, as lm-eval splits it."""
    return re.sub(r"\s+", " ", " ".join(row["text"] for row in read_rows(path))).split(" ")


def _fresh(name: str) -> ModuleType:
    """A new copy of one of lm-eval's RULER modules: its own random stream starts anew, and changes to it stay here."""
    import lm_eval.tasks

    _import_needles()
    path = Path(lm_eval.tasks.__file__).parent / "ruler" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"golinear_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WordPairs(Sequence[str]):
    """``sorted({f"{a}-{n}" for a in adjectives for n in nouns})`` without its 6 million strings (9 s and 600 MB).

    Pairs sort by ``adjective-`` first. Only where one such head begins another (``blue-``, ``blue-eyed-``) do their
    pairs mix: those blocks, a handful, are made.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self.nouns = sorted(set(nouns))
        blocks: list[list[str]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if blocks and head.startswith(blocks[-1][0]):
                blocks[-1].append(head)
            else:
                blocks.append([head])
        self.blocks = [
            heads[0] if len(heads) == 1 else sorted({h + n for h in heads for n in self.nouns}) for heads in blocks
        ]
        sizes = [len(self.nouns) if isinstance(block, str) else len(block) for block in self.blocks]
        self.starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        at = bisect.bisect_right(self.starts, index) - 1
        block, inside = self.blocks[at], index - self.starts[at]
        return block + self.nouns[inside] if isinstance(block, str) else block[inside]


def _import_needles() -> ModuleType:
    """lm-eval's needle generator, imported without its word list (``WordPairs`` stands in) and without a download.

    It fetches nltk's sentence model at import; without it an untrained one splits the essays.
    """
    if (loaded := sys.modules.get(_NEEDLES)) is not None:
        return loaded
    import nltk
    import wonderwords

    real, download = wonderwords.RandomWord, nltk.download
    words = real()._categories
    wonderwords.RandomWord = lambda: SimpleNamespace(_categories={kind: [] for kind in words})
    if not hub_reachable():
        nltk.download = lambda *args, **kwargs: False
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(_NEEDLES)
    finally:
        wonderwords.RandomWord, nltk.download = real, download
    module.WORDS = WordPairs(words["adjectives"], words["nouns"])  # type: ignore[attr-defined]
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        module.sent_tokenize = nltk.tokenize.punkt.PunktSentenceTokenizer().tokenize  # type: ignore[attr-defined]
    return module


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global random streams as lm-eval seeds them (0 and 1234), moved on by ``seed``; put back at the end."""
    import numpy as np

    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(1234 + seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
