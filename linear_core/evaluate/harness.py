"""An lm-eval model that runs what requests share once. For plain and linearized models, the same answers as HFLM.

Importing this module imports lm-eval.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from linear_core.evaluate.generation import Generator
from linear_core.evaluate.prefix import MIN_SAVING, Node, num_tokens, plan
from linear_core.evaluate.runner import Runner
from linear_core.evaluate.walk import Walker
from linear_core.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
Request = tuple[Any, list[int], list[int]]  # what was asked, context tokens, continuation tokens
START_TOKENS = {"cpu": 2048, "cuda": 65536}  # tokens of a first batch; grows on CUDA until it does not fit
CPU_BATCH_BYTES = 2 << 30
INNER_ROWS = 64  # shared segments whose states are alive together


class TruncationError(ValueError):
    """A prompt and its continuation do not fit the model's positions: refused, never cut."""


class PrefixLM(TemplateLM):
    """lm-eval's interface over one model in memory.

    batch_size: rows a batch, or ``auto``: by tokens, found by trial and halved on out-of-memory. Answers do not depend
    on it, nor on how many ranks share the requests. ``settled``: (request, text so far) → whether more text can no longer
    change its score: generation stops. Raises TruncationError instead of cutting a prompt, ValueError for sampling.
    """

    backend = "causal"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int | str = "auto",
        max_length: int | None = None, min_saving: int = MIN_SAVING, switches: dict[str, Any] | None = None,
        settled: Callable[[Instance, str], bool] | None = None, ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        super().__init__()
        if batch_size != "auto" and (type(batch_size) is not int or batch_size < 1):
            raise ValueError(f"batch_size must be 'auto' or a whole number ≥ 1, not {batch_size!r}")
        self.runner = Runner(model, switches=switches)
        self.tokenizer = tokenizer
        self.rows = batch_size if isinstance(batch_size, int) else None
        self.max_length = max_length or model.config.max_position_embeddings
        self.min_saving = min_saving
        self.settled = settled
        self.ranks = ranks
        self.budget = START_TOKENS.get(self.runner.device.type, 2048)
        self.growing = self.runner.device.type == "cuda"
        self.tokens_forwarded = 0
        self.tokens_asked = 0

    # what lm-eval asks of a model

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._encode([string], add_special_tokens)[0]

    def _encode(self, strings: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Tokens of many strings at once. None: special tokens as the tokenizer adds them, but never a second BOS."""
        if add_special_tokens is None:
            bos = str(self.tokenizer.decode([self.prefix_token_id]))
            started = [bool(bos) and string.startswith(bos) for string in strings]
            if any(started) and not all(started):
                return [self._encode([string])[0] for string in strings]
            add_special_tokens = not any(started)
        if not strings:
            return []
        return self.tokenizer(list(strings), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def _shared(self, requests: list[Instance], answer: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        """The answers to all requests, each rank having given its own: neighbours in a row, whole documents."""
        documents = [(request.task_name, request.doc_id) for request in requests]
        order = {document: number for number, document in enumerate(dict.fromkeys(documents))}
        part = self.ranks.block(len(order))
        own = [r for r, document in zip(requests, documents) if part.start <= order[document] < part.stop]
        before = self.tokens_forwarded, self.tokens_asked
        told = self.ranks.gather(lambda: (answer(own) if own else [], self.tokens_forwarded, self.tokens_asked))
        self.tokens_forwarded = before[0] + sum(forwarded - before[0] for _, forwarded, _ in told)
        self.tokens_asked = before[1] + sum(asked - before[1] for _, _, asked in told)
        # requests come document by document or not: a rank's answers stand in the order of its own requests
        answers = [iter(given) for given, _, _ in told]
        ends = [len(order) * (rank + 1) // len(told) for rank in range(len(told))]
        return [next(answers[bisect_right(ends, order[document])]) for document in documents]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._shared(requests, self._loglikelihood)

    def _loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._loglikelihood_tokens(self._encode_pairs([request.args for request in requests]))

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """(context, continuation) → tokens, as TemplateLM cuts them: the continuation is what the whole has more."""
        moved = []
        for context, continuation in pairs:
            stripped = context.rstrip()
            moved.append((stripped, context[len(stripped) :] + continuation))
        contexts = list(dict.fromkeys(c for c, _ in moved if c))
        tokens = dict(zip(contexts, self._encode(contexts)))
        wholes = self._encode([c + continuation for c, continuation in moved if c])
        whole = iter(wholes)
        requests: list[Request] = []
        for pair, (context, continuation) in zip(pairs, moved):
            if context:
                head = tokens[context]
                requests.append((pair, head, next(whole)[len(head) :]))
            else:
                tail = self.tok_encode(continuation, add_special_tokens=False)
                start = [self.prefix_token_id]
                requests.append((pair, start, tail) if tail[0] != start[0] else (pair, tail[:1], tail[1:]))
        return requests

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._shared(requests, self._loglikelihood_rolling)

    def _loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        windows: list[Request] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            ):  # fmt: skip
                windows.append((None, *make_disjoint_window(window)))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._loglikelihood_tokens(windows)):
            totals[number] += value
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation."""
        rows: dict[tuple[int, ...], int] = {}
        wanted: dict[int, list[int]] = defaultdict(list)  # row → requests on it
        for number, (asked, context, continuation) in enumerate(requests):
            if not continuation or not context:
                raise ValueError(f"request {number} has no tokens to score: {asked!r}")
            sequence = (*context, *continuation[:-1])
            self._check_length(len(sequence), "context and continuation")
            wanted[rows.setdefault(sequence, len(rows))].append(number)
        trees = plan(list(rows), min_saving=self.min_saving)
        self.tokens_asked += sum(map(len, rows))
        sums, greedy = [0.0] * len(requests), [True] * len(requests)
        progress = Progress("scoring", num_tokens(trees))
        scorer = _Scorer(self, requests, wanted, sums, greedy, progress)
        scorer.run(trees, None, [0] * len(trees))
        return list(zip(sums, greedy))

    def _check_length(self, num: int, what: str) -> None:
        if num > self.max_length:
            raise TruncationError(
                f"{what} take {num} tokens, but the model has {self.max_length} positions; a prompt is never cut"
            )

    # batches

    @property
    def inner_rows(self) -> int:
        """Shared segments that are run in one batch: one where caches grow, and on the CPU, where pads only cost."""
        return INNER_ROWS if self.runner.stateful and self.runner.device.type == "cuda" else 1

    def batches(self, lengths: Sequence[int], past: int = 0, most: int | None = None) -> Iterator[slice]:
        """Slices of rows sorted by length, longest first; reads the budget anew for each: a back-off takes effect."""
        first = 0
        while first < len(lengths):
            rows = self.rows or max(1, self.budget // lengths[first])
            if self.runner.device.type == "cpu":
                rows = min(rows, max(1, CPU_BATCH_BYTES // self.runner.row_bytes(past + lengths[first])))
            rows = min(rows, most or rows, len(lengths) - first)
            yield slice(first, first + rows)
            first += rows

    def guarded(self, run: Callable[[slice], None], part: slice, length: int) -> None:
        """Runs a batch; halves it, and the budget for later ones, as long as it does not fit in memory."""
        try:
            run(part)
        except torch.OutOfMemoryError:
            if part.stop - part.start == 1:
                raise
            self.growing = False
            self.budget = max(length, (part.stop - part.start) * length // 2)
            log.info(
                "out of memory with %d rows of %d tokens: batches of %d tokens from here on",
                part.stop - part.start,
                length,
                self.budget,
            )
        else:
            if self.growing and (part.stop - part.start + 1) * length > self.budget:
                self.budget = min(self.budget * 2, 1 << 20)
            return
        torch.cuda.empty_cache()
        middle = (part.start + part.stop) // 2
        self.guarded(run, slice(part.start, middle), length)
        self.guarded(run, slice(middle, part.stop), length)

    # generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._shared(requests, self._generate_until)

    def _generate_until(self, requests: list[Instance]) -> list[str]:
        texts = [""] * len(requests)
        prompts = self._encode([request.args[0] for request in requests])
        by_kind: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            kwargs = request.args[1]
            if kwargs.get("do_sample") or kwargs.get("temperature") or kwargs.get("num_beams", 1) != 1:
                raise ValueError(f"only greedy generation is offered, not {kwargs}")
            until = kwargs.get("until") or []
            most = kwargs.get("max_gen_toks", 256)
            self._check_length(len(prompts[number]) + most, "prompt and generation")
            by_kind[(most, *([until] if isinstance(until, str) else until))].append(number)
        self.tokens_asked += sum(map(len, prompts))
        progress = Progress("generating", len(requests))

        def put(number: int, text: str) -> None:
            texts[number] = text
            progress.add(1)

        for (most, *until), numbers in by_kind.items():
            Generator(self, most, until, put).texts({n: prompts[n] for n in numbers}, requests)
        return texts


class _Scorer(Walker):
    """Adds up the log-likelihoods of the requests."""

    def __init__(self, lm: PrefixLM, requests: list[Request], wanted: dict[int, list[int]], sums: list[float],
                 greedy: list[bool], progress: Progress) -> None:  # fmt: skip
        super().__init__(lm)
        self.requests, self.wanted, self.sums, self.greedy, self.progress = requests, wanted, sums, greedy, progress

    def forward(self, nodes: list[Node], cache: Any) -> None:
        """One forward pass over the segments and the scores that it settles."""
        tokens, mask = self.batch(nodes)
        asked = [(row, request) for row, node in enumerate(nodes) for request in self._requests(node)]
        rows: list[int] = []
        columns: list[int] = []
        targets: list[int] = []
        owners: list[int] = []
        slots: dict[tuple[int, int], int] = {}
        picks: list[int] = []
        for row, number in asked:
            node, (_, context, continuation) = nodes[row], self.requests[number]
            for position in range(
                max(len(context) - 1, node.start), min(len(context) + len(continuation) - 1, node.end)
            ):
                slot = slots.setdefault((row, position - node.start), len(slots))
                if slot == len(rows):
                    rows.append(row)
                    columns.append(position - node.start)
                picks.append(slot)
                targets.append(continuation[position - len(context) + 1])
                owners.append(number)
        if rows:
            logits = self.lm.runner.logits(tokens, at=(rows, columns), cache=cache, mask=mask)
            pick = torch.tensor(picks, device=logits.device)
            target = torch.tensor(targets, device=logits.device)
            best = logits.argmax(-1)[pick] == target
            chosen = logits[pick, target] - logits.logsumexp(-1)[pick]
            for number, value, hit in zip(owners, chosen.tolist(), best.tolist()):
                self.sums[number] += value
                self.greedy[number] &= hit
        else:
            self.lm.runner.prefill(tokens, cache, mask)
        count = sum(len(node.tokens) for node in nodes)
        self.lm.tokens_forwarded += count
        self.progress.add(count)

    def _requests(self, node: Node) -> Iterator[int]:
        """Requests that want logits inside this node: those of rows at or below it whose context ends early enough."""
        for below in node.walk():
            for row in below.rows:
                yield from (n for n in self.wanted[row] if len(self.requests[n][1]) <= node.end)


class Progress:
    """Says in the log how far long work is: at most one line every ten seconds, none for short work."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.started = self.said = time.monotonic()

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said >= 10 and self.done < self.total:
            self.said = now
            left = (now - self.started) * (self.total - self.done) / self.done
            log.info(
                "%s: %d of %d (%.0f%%), about %.0f s left",
                self.what,
                self.done,
                self.total,
                100 * self.done / self.total,
                left,
            )
