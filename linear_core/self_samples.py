"""Training text that the base model writes itself, so that nothing but the model is needed. Seeded.

A document is LENGTH tokens: a first token drawn uniformly from the ordinary vocabulary, then plain ancestral sampling
at temperature 1 with special tokens ruled out. Documents come in batches that grow, so that a small need costs little
on a CPU and a large one fills a GPU. They are packed and cached as any text (linear_core.data), so they are made once.
Imports torch only inside functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LENGTH = 256
FIRST_ROWS, MOST_ROWS = 16, 512
SETTINGS = ("ancestral", 2, LENGTH, FIRST_ROWS, MOST_ROWS)  # the identity of the samples, next to the base model's


def batch_rows(index: int) -> int:
    """Rows of sampling batch ``index``: 16, 48, 192, 512, 512, …: 4k, 16k and 65k tokens in all, then 131k at a time."""
    return FIRST_ROWS if index == 0 else min(3 * FIRST_ROWS << 2 * min(index - 1, 8), MOST_ROWS)


def documents(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: bool, skip: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
    """(position, token ids [LENGTH]) without end, from position ``skip`` on. heldout: a stream of its own seeds."""
    first, index = 0, 0
    while True:
        rows = batch_rows(index)
        if first + rows > skip:
            sampled = sample(model, tokenizer, rows, seed=2 * index + heldout)
            yield from ((first + i, sampled[i]) for i in range(rows) if first + i >= skip)
        first, index = first + rows, index + 1


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int, *, seed: int) -> np.ndarray:
    """``rows`` documents as int64 [rows, LENGTH], by one batched decode. Deterministic on one kind of device."""
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    allowed = torch.ones(model.config.vocab_size, dtype=torch.bool, device=device)
    allowed[len(tokenizer) :] = False
    allowed[[i for i in tokenizer.all_special_ids if i < len(allowed)]] = False
    written = [torch.multinomial(allowed.float(), rows, replacement=True, generator=generator)[:, None]]
    # transformers 5.24 calls it cache, earlier releases past_key_values
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {argument: DynamicCache(config=model.config)}
    with torch.inference_mode():
        for _ in range(LENGTH - 1):
            logits = model(input_ids=written[-1], use_cache=True, **cache).logits[:, -1].float()
            probabilities = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
            below = probabilities.cumsum(-1)  # one random number a row, where multinomial draws one a word
            drawn = torch.rand(rows, 1, generator=generator, device=device) * below[:, -1:]
            written.append(torch.searchsorted(below, drawn, right=True).clamp_(max=len(allowed) - 1))
    return torch.cat(written, 1).cpu().numpy().astype(np.int64)
