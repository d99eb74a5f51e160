"""A small world for real sweeps: a tiny random model with a byte tokenizer and texts to train and measure on."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linear_core.models import Shape
from linear_core.models import build as build_model
from sweeps.home import home
from sweeps.request import build
from sweeps.sweep import pin

TINY = Shape(
    family="llama",
    hidden=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=64,
    vocab=257,
    tied=True,
    max_positions=2048,
    rope_theta=1e4,
    rms_eps=1e-5,
)
WORDS = "the a sea ship wind sails over under calm grey light old man and boy went out into night".split()


def make_model(folder: Path) -> Path:
    """Random weights and a tokenizer of 256 bytes and an end token, as a Hugging Face folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, [], unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    build_model(TINY, device="cpu", seed=1).save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """train_text and heldout_text as GOLINEAR_DATA has them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for name, count in (("train_text", 60), ("heldout_text", 20)):
        rows = [{"text": " ".join(draw.choices(WORDS, k=200)), "id": i, "title": f"text {i}"} for i in range(count)]
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def break_cell(asked: dict[str, Any], mechanism: str) -> str:
    """From now on the results of this cell cannot be written: a folder lies where the file should be. Its key."""
    broken = next(cell for cell in pin(build(**asked)).cells if cell.recipe.mechanism == mechanism)
    for attempt in range(1, 60):
        (home() / "cells" / broken.train_key / str(attempt) / "new_parameters.safetensors").mkdir(parents=True)
    return broken.train_key
