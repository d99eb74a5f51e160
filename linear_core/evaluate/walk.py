"""Runs the trees of shared segments that ``prefix.plan`` makes: each segment once, on a fork of its parent's cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linear_core.evaluate.prefix import Node

if TYPE_CHECKING:
    from linear_core.evaluate.harness import PrefixLM


class Walker(ABC):
    """Walks depth first. What is done with a segment is ``forward``'s; ``keeps_leaves``: leaves need their cache too."""

    keeps_leaves = False

    def __init__(self, lm: PrefixLM) -> None:
        self.lm = lm

    @abstractmethod
    def forward(self, nodes: list[Node], cache: Any) -> None:
        """Runs the segments of ``nodes``, a row each, and takes from them what is wanted. ``cache``: of what is before
        them, filled with them where it is kept; None: nothing is before them, and nothing is kept."""

    def run(self, nodes: list[Node], cache: Any, rows: list[int]) -> None:
        """All of ``nodes``; the tokens before node i are in row ``rows[i]`` of ``cache`` (None: there are none).

        Leaves go in batches, longest first. Shared segments too where a cache's rows need not be of one length: a state
        is of one size after any number of tokens, so that the leaves of several prefixes fill one batch.
        """
        runner = self.lm.runner
        order = sorted(range(len(nodes)), key=lambda i: -len(nodes[i].tokens))
        leaves = [i for i in order if not nodes[i].children]
        inner = [i for i in order if nodes[i].children]
        lengths = [len(nodes[i].tokens) for i in leaves]

        def fork(chosen: list[int]) -> Any:
            return runner.new_cache(len(chosen)) if cache is None else runner.select(cache, [rows[i] for i in chosen])

        def leaf_batch(part: slice) -> None:
            chosen = leaves[part]
            self.forward([nodes[i] for i in chosen], None if cache is None and not self.keeps_leaves else fork(chosen))

        for part in self.lm.batches(lengths, past=nodes[leaves[0]].start if leaves else 0):
            self.lm.guarded(leaf_batch, part, lengths[part.start])

        ready: list[tuple[list[int], Any]] = []

        def inner_batch(part: slice) -> None:
            chosen = inner[part]
            own = fork(chosen)
            self.forward([nodes[i] for i in chosen], own)
            ready.append((chosen, own))

        lengths = [len(nodes[i].tokens) for i in inner]
        for part in self.lm.batches(lengths, most=self.lm.inner_rows):
            self.lm.guarded(inner_batch, part, lengths[part.start])
            while ready:
                chosen, own = ready.pop()
                below = [(child, row) for row, i in enumerate(chosen) for child in nodes[i].children]
                self.run([child for child, _ in below], own, [row for _, row in below])
                del own

    def batch(self, nodes: list[Node]) -> tuple[Tensor, Tensor | None]:
        """The segments padded on the right [B, T], and the mask [B, T] where what is kept must not hold pads."""
        lengths = [len(node.tokens) for node in nodes]
        width, device = max(lengths), self.lm.runner.device
        tokens = torch.tensor([[*n.tokens, *[0] * (width - len(n.tokens))] for n in nodes], device=device)
        if min(lengths) == width or not (nodes[0].children or self.keeps_leaves):
            return tokens, None
        return tokens, (torch.arange(width) < torch.tensor(lengths)[:, None]).long().to(device)
