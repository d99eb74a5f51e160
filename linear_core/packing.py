"""Tokens of documents laid end to end, on disk, in memory-mapped shards that are made as far as they are needed.

The stream is fixed by the documents, the encoding and the separator. Shards are only how it is kept: one ends with the
document that reaches the size asked for, between first_shard and LARGEST_SHARD. So a demo of 4k tokens tokenises seconds'
worth of text, and the stream's start is the same however far it is extended. A shard is two files, ``00000.tokens`` (the
raw integers) and ``00000.json`` (counts and where documents start, written last); an incomplete one is made again.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

LARGEST_SHARD = 1 << 22  # tokens
TOKENS_AT_ONCE = 1 << 20  # about what is given to the tokenizer in one call, which spreads it over the cores

Documents = Iterator[tuple[int, Any]]  # (position in the source, text or token ids)


class PackedTokens:
    """The packed stream of one source, in a folder of shards that several processes may share.

    read: position → documents from there on. encode: documents' contents → their token ids. separator: the token after
    every document. first_shard: the least tokens of a shard. units_per_token: length of a content, about, per token.
    """

    def __init__(
        self,
        folder: Path,
        read: Callable[[int], Documents],
        encode: Callable[[list[Any]], list[Any]],
        *,
        separator: int,
        dtype: type[np.unsignedinteger],
        first_shard: int,
        units_per_token: int = 4,
    ) -> None:
        self.folder, self.first_shard, self._units_per_token = folder, first_shard, units_per_token
        self._read, self._encode, self._separator, self._dtype = read, encode, separator, np.dtype(dtype)
        self._shards: list[np.memmap] = []
        self._starts = np.empty(0, dtype=np.int64)
        self._next_document, self._ended = 0, False
        self._stream: Documents = iter(())
        self._stream_at = -1  # position after the last document taken from stream and pending
        self._pending: deque[tuple[int, np.ndarray]] = deque()  # tokenised, not yet in a shard

    @property
    def num_tokens(self) -> int:
        """Tokens made so far."""
        return sum(map(len, self._shards))

    def extend(self, num_tokens: int) -> int:
        """Make ``num_tokens`` tokens available, or all there are. Returns how many of those asked for are there."""
        while self.num_tokens < num_tokens and not self._ended:
            if not self._load_shard():
                self._make_shard(num_tokens - self.num_tokens)
        self._stream, self._stream_at = iter(()), -1  # an open stream can hold a file or a model
        return min(num_tokens, self.num_tokens)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop−1 of the stream, int64 [stop − start]."""
        pieces, offset = [], 0
        for shard in self._shards:
            pieces.append(shard[max(0, start - offset) : max(0, stop - offset)])
            offset += len(shard)
        return np.concatenate(pieces).astype(np.int64)

    def document_ids(self, start: int, stop: int) -> np.ndarray:
        """The document of tokens start … stop−1, counted from 0 at ``start``. int64 [stop − start]."""
        ids = np.searchsorted(self._starts, np.arange(start, stop), side="right")
        return ids - ids[0]

    def _paths(self) -> tuple[Path, Path]:
        name = f"{len(self._shards):05d}"
        return self.folder / f"{name}.tokens", self.folder / f"{name}.json"

    def _load_shard(self) -> bool:
        """Map the next shard, if it is there and whole."""
        path, note = self._paths()
        try:
            facts = json.loads(note.read_text())
            if path.stat().st_size != facts["tokens"] * self._dtype.itemsize:
                return False
        except (OSError, json.JSONDecodeError):
            return False
        self._next_document, self._ended = facts["next_document"], facts["last"]
        if facts["tokens"]:
            self._starts = np.concatenate([self._starts, np.asarray(facts["starts"], dtype=np.int64) + self.num_tokens])
            self._shards.append(np.memmap(path, dtype=self._dtype, mode="r"))
        return True

    def _make_shard(self, num_tokens: int) -> None:
        """Tokenise documents for about that many tokens. Another process that is at it is waited for."""
        from filelock import FileLock  # torch and the hub client depend on it

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            if self._load_shard():
                return
            taken = self._take(min(max(num_tokens, self.first_shard), LARGEST_SHARD))
            lengths = [len(ids) for _, ids in taken]
            facts = {
                "tokens": sum(lengths),
                "next_document": self._stream_at,
                "last": not taken,
                "starts": np.cumsum([0, *lengths[:-1]]).tolist(),
            }
            path, note = self._paths()
            replace_file(path, b"".join(ids.tobytes() for _, ids in taken))
            replace_file(note, json.dumps(facts).encode())
            logger.info("packed %d tokens of %d documents into %s", facts["tokens"], len(taken), path)
            self._load_shard()

    def _take(self, num_tokens: int) -> list[tuple[int, np.ndarray]]:
        """The next documents, tokenised, until they hold ``num_tokens`` or end."""
        if self._stream_at != self._next_document:  # the first shard made here, or others were made elsewhere
            self._stream, self._pending = self._read(self._next_document), deque()
            self._stream_at = self._next_document
        taken: list[tuple[int, np.ndarray]] = []
        while num_tokens > 0 and (self._pending or self._tokenise(min(num_tokens, TOKENS_AT_ONCE))):
            position, ids = self._pending.popleft()
            taken.append((position, ids))
            num_tokens -= len(ids)
            self._stream_at = position + 1
        return taken

    def _tokenise(self, num_tokens: int) -> bool:
        """Read and tokenise documents of about that many tokens, at least one. False at the end of the source."""
        room = num_tokens * self._units_per_token
        documents: list[tuple[int, Any]] = []
        while room > 0 and (document := next(self._stream, None)) is not None:
            documents.append(document)
            room -= len(document[1])
        encoded = self._encode([content for _, content in documents]) if documents else []
        for (position, _), ids in zip(documents, encoded):
            self._pending.append((position, np.asarray([*ids, self._separator], dtype=self._dtype)))
        return bool(documents)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a name of this process, to disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
