"""A tokenizer and documents for tests that need text: one token a byte, made here, no download."""

import gzip
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 97  # of tests.core.tiny


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The first 96 byte-level letters, and <end> as token 96."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def texts(number: int, seed: int = 0) -> list[str]:
    """Documents of 20 to 400 letters."""
    random = np.random.default_rng(seed)
    return ["".join(map(chr, random.integers(97, 123, random.integers(20, 400)))) for _ in range(number)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path
