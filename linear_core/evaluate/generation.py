"""Greedy generation for lm-eval: left-padded batches, or shared prompts run once where a model has a constant-size state.

RULER's prompts on one haystack are equal up to the first needle; a prompt asked again, or asked something else at its
end, is run once and its state forked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linear_core.evaluate.prefix import Node, num_tokens, plan
from linear_core.evaluate.walk import Walker

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from linear_core.evaluate.harness import PrefixLM

POOL_BYTES = 2 << 30  # of caches that wait for their decode steps, on the CPU
MOST_ROWS = 256  # of one decode batch
# A segment of its own costs a pass with few rows, which a GPU runs no faster than one of some thousand tokens; needles at
# 40 depths make a comb of such passes. And less than this share of the tokens saved is not worth smaller batches.
MIN_SAVING_GPU, LEAST_SHARE = 2048, 0.1


class Generator(Walker):
    """Texts of requests that want ``most`` tokens at most and stop at ``until``; ``put(number, text)`` gets each."""

    keeps_leaves = True

    def __init__(self, lm: PrefixLM, most: int, until: list[str], put: Callable[[int, str], None]) -> None:
        super().__init__(lm)
        self.most, self.until, self.put = most, until, put
        self.pool: list[tuple[list[int], Any]] = []

    def texts(self, prompts: dict[int, list[int]], requests: Sequence[Instance]) -> None:
        """All prompts by request number. Shared segments are run once where that saves anything and rows may be joined."""
        self.prompts, self.requests = prompts, requests
        if self.lm.runner.stateful:
            self.numbers = [n for n, prompt in prompts.items() if len(prompt) > 1]
            # the last token of a prompt is its first decode step: a prompt may end inside another one
            heads = [tuple(prompts[n][:-1]) for n in self.numbers]
            on_gpu = self.lm.runner.device.type == "cuda"
            trees = plan(heads, min_saving=max(self.lm.min_saving, MIN_SAVING_GPU if on_gpu else 0))
            if num_tokens(trees) < (1 - LEAST_SHARE) * sum(map(len, heads)):
                self.run(trees, None, [0] * len(trees))
                self._flush()
                prompts = {n: prompt for n, prompt in prompts.items() if len(prompt) <= 1}
        self._alone(list(prompts))

    def _alone(self, numbers: list[int]) -> None:
        """Each prompt run in full, in left-padded batches, longest first."""
        order = sorted(numbers, key=lambda n: -len(self.prompts[n]))
        lengths = [len(self.prompts[n]) + self.most for n in order]
        for part in self.lm.batches(lengths):
            self.lm.guarded(lambda part: self._padded(order[part]), part, lengths[part.start])

    def _padded(self, numbers: list[int]) -> None:
        """One left-padded batch from the start."""
        lm, prompts = self.lm, [self.prompts[n] for n in numbers]
        width, device = max(map(len, prompts)), lm.runner.device
        pad = lm.tokenizer.pad_token_id if lm.tokenizer.pad_token_id is not None else lm.eot_token_id
        tokens = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        lm.tokens_forwarded += sum(map(len, prompts))
        self._greedy(numbers, tokens, lm.runner.new_cache(len(prompts)), mask)

    # shared prompts

    def forward(self, nodes: list[Node], cache: Any) -> None:
        tokens, mask = self.batch(nodes)
        self.lm.runner.prefill(tokens, cache, mask)
        self.lm.tokens_forwarded += sum(len(node.tokens) for node in nodes)
        rows = [(i, row) for i, node in enumerate(nodes) for row in node.rows]
        if not rows:
            return
        ends = [i for i, _ in rows]
        plain = ends == list(range(len(nodes))) and not any(node.children for node in nodes)
        self.pool.append(
            ([self.numbers[row] for _, row in rows], cache if plain else self.lm.runner.select(cache, ends))
        )
        if sum(len(numbers) for numbers, _ in self.pool) >= self._room(cache.nbytes // len(nodes)):
            self._flush()

    def _room(self, row_bytes: int) -> int:
        """Rows whose caches may wait together, for decode steps of large batches."""
        cuda = self.lm.runner.device.type == "cuda"
        free = torch.cuda.mem_get_info()[0] // 4 if cuda else POOL_BYTES
        return max(1, min(self.lm.rows or MOST_ROWS, free // max(1, row_bytes)))

    def _flush(self) -> None:
        """Decode all that waits."""
        if not self.pool:
            return
        numbers = [number for numbers, _ in self.pool for number in numbers]
        caches = [cache for _, cache in self.pool]
        self.pool.clear()
        try:
            last = torch.tensor([self.prompts[n][-1:] for n in numbers], device=self.lm.runner.device)
            self.lm.tokens_forwarded += len(numbers)
            self._greedy(numbers, last, self.lm.runner.join(caches), None)
            return
        except torch.OutOfMemoryError:
            caches.clear()
        self._alone(numbers)  # what was decoded has changed the caches

    # decoding

    def _greedy(self, numbers: list[int], tokens: Tensor, cache: Any, mask: Tensor | None) -> None:
        """Greedy texts after tokens [B, T]: cut before the first stop string, at the end token, or once settled.

        mask: [B, T] 0 at pads on the left; None: there are none.
        """
        lm = self.lm
        if mask is not None and bool(mask.all()):
            mask = None
        alive = list(range(len(numbers)))
        made: list[list[int]] = [[] for _ in numbers]
        for step in range(self.most):
            new = lm.runner.logits(tokens, cache=cache, mask=mask).argmax(-1)
            if lm.runner.stateful:
                mask = None  # pads never entered the state
            keep = []
            for i, (row, token) in enumerate(zip(alive, new.tolist())):
                ended = token == lm.eot_token_id
                if not ended:
                    made[row].append(token)
                look = step % 4 == 3 or step == self.most - 1 or self.until
                if ended or step == self.most - 1 or (look and self._finished(made[row], self.requests[numbers[row]])):
                    self.put(numbers[row], self._cut(made[row]))
                else:
                    keep.append(i)
            if not keep:
                break
            if len(keep) < len(alive):
                index = torch.tensor(keep, device=tokens.device)
                cache.batch_select_indices(index)
                new, alive = new[index], [alive[i] for i in keep]
                mask = None if mask is None else mask[index]
            tokens = new[:, None]
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
            lm.tokens_forwarded += len(alive)

    def _finished(self, made: list[int], request: Instance) -> bool:
        text = self._text(made)
        return any(stop in text for stop in self.until) or (
            self.lm.settled is not None and self.lm.settled(request, text)
        )

    def _text(self, tokens: list[int]) -> str:
        return str(self.lm.tokenizer.decode(tokens, skip_special_tokens=True))

    def _cut(self, made: list[int]) -> str:
        text = self._text(made)
        for stop in self.until:
            text = text.split(stop)[0]
        return text
