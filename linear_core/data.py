"""Training batches and held-out text, made of a source's packed tokens (recipe section 5). Imports no torch.

Documents are tokenised without special tokens, each is followed by the tokenizer's end-of-text token, and all are laid
end to end and kept in a cache folder named by everything that decides its content (linear_core.packing).

Order. A run of n sequences of length T draws on the first P blocks of T tokens of that stream: P = n or what the
first shard holds, if that is more; fewer when the source ends before. Sequence i is block ``order(i // P)[i % P]``,
where ``order`` sorts the P blocks by a hash of (seed, pass, block). So batches are a pure function of source, tokenizer,
settings, seed and step, the same on any machine and number of GPUs.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linear_core import models, self_samples, sources
from linear_core.packing import PackedTokens
from linear_core.sources import data_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from linear_core.settings import TrainSettings

__all__ = ["IGNORE", "Batch", "TokenData", "data_fingerprint", "open_tokens"]

PACKING_VERSION = 1
IGNORE = -100  # a label that asks for no prediction
FIRST_SHARD = {"local": 1 << 17, "hub": 1 << 15, "self": 1 << 12}  # tokens: what a kind of source gives at little cost


@dataclass(frozen=True)
class Batch:
    """The sequences of one optimiser step.

    input_ids: int64 [B, T]. labels: int64 [B, T], shifted already: the next token, or IGNORE where none is to be
    predicted (the last position; with isolated documents, the last of each). document_ids: int64 [B, T] counting from 0
    in each row, None when documents are not isolated.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    document_ids: np.ndarray | None = None

    @property
    def num_targets(self) -> int:
        """Predicted tokens, which a loss is normalised by."""
        return int((self.labels != IGNORE).sum())


class TokenData:
    """A source's packed tokens: batches to train on, and a held-out part that no batch ever contains.

    fingerprint: 16 hex of all that decides the tokens (source, tokenizer, separator, packing; for ``self`` the base).
    """

    def __init__(self, name: str, train: PackedTokens, heldout: PackedTokens, fingerprint: str) -> None:
        self.name, self.fingerprint = name, fingerprint
        self._train, self._heldout = train, heldout

    def batch(self, step: int, settings: TrainSettings, seed: int) -> Batch:
        """Sequences of optimiser step ``step`` (from 0); B is the batch size, less in a last step that needs fewer.

        Raises ValueError when the source has not even one sequence of this length.
        """
        length, size = settings.sequence_length, settings.batch_size
        wanted = math.ceil(settings.tokens / length)
        pool = self._blocks(self._train, wanted, length)
        chosen = []
        for i in range(step * size, min((step + 1) * size, wanted)):
            chosen.append(int(_order(seed, i // pool, pool)[i % pool]) * length)
        input_ids = np.stack([self._train.tokens(start, start + length) for start in chosen])
        labels = np.full_like(input_ids, IGNORE)
        labels[:, :-1] = input_ids[:, 1:]
        if not settings.isolate_documents:
            return Batch(input_ids, labels)
        document_ids = np.stack([self._train.document_ids(start, start + length) for start in chosen])
        labels[:, :-1][document_ids[:, 1:] != document_ids[:, :-1]] = IGNORE
        return Batch(input_ids, labels, document_ids)

    def heldout(self, num_tokens: int, length: int) -> np.ndarray:
        """Tokens that are never trained on, int64 [⌈num_tokens / length⌉, length], spread over documents.

        Fewer rows when the held-out part is shorter. Raises ValueError when it has not one row.
        """
        wanted = math.ceil(num_tokens / length)
        pool = self._blocks(self._heldout, wanted, length)
        rows = min(wanted, pool)
        starts = [i * pool // rows * length for i in range(rows)]
        return np.stack([self._heldout.tokens(start, start + length) for start in starts])

    def _blocks(self, packed: PackedTokens, wanted: int, length: int) -> int:
        """Blocks of ``length`` tokens to draw on. At least one, else ValueError."""
        pool = packed.extend(max(wanted, packed.first_shard // length) * length) // length
        if pool == 0:
            raise ValueError(
                f"data source {self.name} has {packed.num_tokens} {packed.folder.name} tokens, less than one sequence "
                f"of {length}; allowed: a shorter sequence_length or a source with more text"
            )
        return pool


def open_tokens(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache_folder: str | Path | None = None,
    base: models.BaseModel | str | None = None,
    device: str = "cpu",
) -> TokenData:
    """The packed tokens of a source (linear_core.sources) under a tokenizer. Nothing is read before it is asked for.

    cache_folder: where packed tokens are kept, GOLINEAR_CACHE/tokens unless given. base, device: the model that writes
    the text of ``self``, loaded on ``device`` when samples are missing. Raises ValueError as ``sources.resolve`` does,
    for ``self`` without a base, and for a tokenizer without an end-of-text token.
    """
    found = sources.resolve(source)
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token (eos_token) to separate documents with")
    identity = {
        "packing": PACKING_VERSION,
        "source": data_fingerprint(found.name),
        "tokenizer": _tokenizer_digest(tokenizer),
        "separator": int(tokenizer.eos_token_id),
    }
    read: Callable[[bool, int], Iterator[tuple[int, Any]]]
    encode: Callable[[list[Any]], list[Any]]
    if found.kind == "self":
        if base is None:
            raise ValueError("data source 'self' needs the base model that writes the text")
        base = models.resolve(base) if isinstance(base, str) else base
        identity["base"] = models.revision(base)
        read, encode = functools.partial(_write_text, base, tokenizer, device), list
    else:
        read, encode = functools.partial(sources.documents, found), functools.partial(_encode, tokenizer)
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache_folder or models.cache_folder() / "tokens") / f"{found.kind}-{fingerprint}"
    packed = functools.partial(
        PackedTokens, encode=encode, separator=int(tokenizer.eos_token_id), first_shard=FIRST_SHARD[found.kind],
        dtype=np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32, units_per_token=1 if found.kind == "self" else 4,
    )  # fmt: skip
    own = f"-{sources.file_digest(Path(found.heldout))[:16]}" if found.heldout else ""
    return TokenData(
        found.name,
        packed(folder / "training", functools.partial(read, False)),
        packed(folder / f"heldout{own}", functools.partial(read, True)),
        fingerprint,
    )


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, by the tokenizer's own threads; no special tokens, no truncation."""
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _write_text(
    base: models.BaseModel, tokenizer: PreTrainedTokenizerBase, device: str, heldout: bool, skip: int
) -> Iterator[tuple[int, np.ndarray]]:
    import torch

    model = models.load(base, device=device, dtype=torch.bfloat16)  # half the bytes a token, on a CPU too
    if device == "cpu":
        model.set_attn_implementation("eager")  # one query a row: twice as fast as the CPU's fused attention
    yield from self_samples.documents(model, tokenizer, heldout, skip)


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    content = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def _order(seed: int, epoch: int, num_blocks: int) -> np.ndarray:
    """The order of one pass over the blocks, int64 [num_blocks]: sorted by splitmix64 of seed, pass and block."""
    word = np.arange(num_blocks, dtype=np.uint64)
    for salt in (seed, epoch):
        word = word * np.uint64(0x9E3779B97F4A7C15) + np.uint64((salt + 1) * 0xD1342543DE82EF95 % (1 << 64))
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return np.argsort(word, kind="stable")
