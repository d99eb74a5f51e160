"""Which token prefixes of many sequences are run once: a tree of shared segments. Pure Python, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MIN_SAVING = 64  # tokens that a shared segment must save before it is worth a forward pass of its own


@dataclass
class Node:
    """Tokens ``start … end`` of the sequences below it, run once on the cache of its parent.

    ``rows``: numbers of the sequences that end here (equal ones, or one that is a prefix of others).
    """

    start: int
    tokens: Sequence[int]  # the segment itself
    rows: list[int] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    low, high = 0, most  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def plan(sequences: Sequence[tuple[int, ...]], *, min_saving: int = MIN_SAVING) -> list[Node]:
    """Trees that cover all sequences. A segment becomes a node when running it once saves ``min_saving`` tokens.

    sequences: not empty, none of length 0. The tokens forwarded are ``num_tokens`` of the result.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    shared = [shared_length(sequences[a], sequences[b]) for a, b in itertools.pairwise(order)]

    def build(low: int, high: int, start: int) -> list[Node]:
        """Nodes for order[low:high], whose first ``start`` tokens are run already."""
        if high - low == 1:
            row = order[low]
            return [Node(start, sequences[row][start:], [row])]
        common = min(shared[low : high - 1])
        groups = _split(shared, low, high, common)
        ending = [order[i] for i in range(low, high) if len(sequences[order[i]]) == common]
        if ending or (common - start) * (high - low - 1) >= min_saving:
            node = Node(start, sequences[order[low]][start:common], ending)
            rest = low + len(ending)
            for a, b in groups:
                if b > rest:
                    node.children += build(max(a, rest), b, common)
            return [node]
        return [node for a, b in groups for node in build(a, b, start)]

    return build(0, len(order), 0) if order else []


def _split(shared: list[int], low: int, high: int, common: int) -> list[tuple[int, int]]:
    """Runs of order[low:high] whose members share more than ``common`` tokens with their neighbour."""
    cuts = [low, *(i + 1 for i in range(low, high - 1) if shared[i] == common), high]
    return list(itertools.pairwise(cuts))


def num_tokens(trees: list[Node]) -> int:
    """Tokens that are forwarded, padding aside."""
    return sum(len(node.tokens) for tree in trees for node in tree.walk())
