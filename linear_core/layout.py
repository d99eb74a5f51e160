"""Where each token of a batch stands in its own sequence.

Inside the attention there are no pads and no neighbours: ``Rows`` gathers every sequence (a batch row without its
pads, or one document of a packed row) to the left of a row of its own and scatters the result back. Window, sinks,
state, convolution and positions then need no special case (recipe sections 2 and 5).

Shape letters: B batch, T tokens, R sequences, L longest of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linear_core.cache import LinearizedCache

PATHS = ("hybrid", "exact", "linear", "base")


@dataclass
class Rows:
    """A one-to-one map between the real tokens of a [B, T] batch and R left-aligned rows of length L."""

    take: Tensor  # [R, L] index into the B·T tokens; 0 where there is none
    valid: Tensor  # [R, L] bool
    put: Tensor  # [B, T] index into the R·L entries; 0 where the token is a pad
    real: Tensor  # [B, T] bool

    @classmethod
    def of(cls, sequence: Tensor, num_rows: int) -> Rows:
        """sequence: [B, T] the row each token belongs to, −1 for a pad. Tokens of one row keep their order."""
        flat = sequence.flatten()
        real = flat >= 0
        owner = torch.where(real, flat, num_rows)
        order = torch.sort(owner, stable=True).indices
        lengths = torch.bincount(owner, minlength=num_rows + 1)[:num_rows]
        longest = max(1, int(lengths.max())) if num_rows else 1
        starts = lengths.cumsum(0) - lengths
        step = torch.arange(longest, device=flat.device)
        valid = step < lengths[:, None]
        take = order[torch.where(valid, starts[:, None] + step, 0)]
        put = torch.zeros_like(flat)
        put[take[valid]] = torch.arange(num_rows * longest, device=flat.device).view(num_rows, longest)[valid]
        return cls(torch.where(valid, take, 0), valid, put.view_as(sequence), real.view_as(sequence))

    def gather(self, x: Tensor) -> Tensor:
        """x: [B, T, …] → [R, L, …], zero where a row has ended."""
        rows = x.flatten(0, 1)[self.take]
        return rows.masked_fill(~_like(self.valid, rows), 0)

    def scatter(self, y: Tensor) -> Tensor:
        """y: [R, L, …] → [B, T, …], zero at pads."""
        tokens = y.flatten(0, 1)[self.put]
        return tokens.masked_fill(~_like(self.real, tokens), 0)


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - 2))


@dataclass
class Layout:
    """What every attention layer of one forward pass must know. Made once by the model, read by the layers."""

    positions: Tensor  # [B, T] of each token in its own sequence, 0 at pads
    rows: Rows | None = None  # None: token t of batch row b is entry t of sequence b
    past: Tensor | None = None  # [R] tokens of each sequence before this pass; None: none
    cache: LinearizedCache | None = None
    paths: str = "hybrid"
    state_frozen_from: int | None = None
    num_tokens: Tensor | None = None  # [R] tokens of this pass; None: all L

    def gather(self, x: Tensor) -> Tensor:
        return x if self.rows is None else self.rows.gather(x)

    def scatter(self, y: Tensor) -> Tensor:
        return y if self.rows is None else self.rows.scatter(y)


def make_layout(
    batch_size: int,
    num_tokens: int,
    device: torch.device,
    *,
    mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    cache: LinearizedCache | None = None,
    paths: str = "hybrid",
    state_frozen_from: int | None = None,
) -> Layout:
    """The layout of a [B, T] pass.

    mask: [B, ≥ T] 1 for real tokens, its last T columns are this pass's. document_ids: [B, T] a number for each
    document, −1 for a pad; equal neighbours belong together. Raises ValueError for combinations that mean nothing.
    """
    if paths not in PATHS:
        raise ValueError(f"paths {paths!r} is not known; allowed: {', '.join(PATHS)}")
    if document_ids is not None and (mask is not None or cache is not None):
        raise ValueError("document_ids goes with neither attention_mask (mark pads with −1) nor a cache")
    past = None if cache is None else cache.positions
    rows = None
    if document_ids is not None:
        rows = _document_rows(document_ids, (batch_size, num_tokens))
    elif mask is not None:
        rows = _padding_rows(mask, (batch_size, num_tokens))
    if rows is None:
        start = 0 if past is None else past[:, None]
        positions = (torch.arange(num_tokens, device=device) + start).expand(batch_size, num_tokens)
        return Layout(positions, None, past, cache, paths, state_frozen_from)
    length = rows.valid.shape[1]
    within = torch.arange(length, device=device).expand(rows.valid.shape)
    positions = rows.scatter(within if past is None else within + past[:, None])
    return Layout(positions, rows, past, cache, paths, state_frozen_from, rows.valid.sum(1))


def _padding_rows(mask: Tensor, shape: tuple[int, int]) -> Rows | None:
    if mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        raise ValueError(
            f"attention_mask must be [batch, tokens so far] = [{shape[0]}, ≥ {shape[1]}], not {list(mask.shape)}"
        )
    real = mask[:, -shape[1] :].bool()
    if bool(real.all()):
        return None
    owner = torch.arange(shape[0], device=mask.device)[:, None].expand(shape)
    return Rows.of(torch.where(real, owner, -1), shape[0])


def _document_rows(document_ids: Tensor, shape: tuple[int, int]) -> Rows:
    if tuple(document_ids.shape) != shape:
        raise ValueError(f"document_ids must be [batch, tokens] = {list(shape)}, not {list(document_ids.shape)}")
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts &= document_ids >= 0
    number = starts.flatten().cumsum(0).view_as(document_ids) - 1
    count = int(starts.sum())
    return Rows.of(torch.where(document_ids >= 0, number, -1), count)
