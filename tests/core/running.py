"""A small run for tests: a tiny linearized model, text of tests.core.texts and settings of a few steps."""

from pathlib import Path

from linear_core import data
from linear_core.convert import convert
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings
from tests.core import tiny
from tests.core.texts import byte_tokenizer, texts, write_jsonl

SETTINGS = TrainSettings(
    tokens=12 * 128, sequence_length=32, batch_size=4, warmup_steps=3, learning_rate=0.01
)  # 12 steps


def model(recipe: str = "gdn 6+2", family: str = "llama"):
    """A converted tiny model at its start values."""
    return convert(tiny.base(family), Recipe.parse(recipe), seed=3)


def tokens(folder: Path, seed: int = 0) -> data.TokenData:
    folder.mkdir(parents=True, exist_ok=True)
    source = write_jsonl(folder / f"text{seed}.jsonl", texts(60, seed))
    return data.open_tokens(f"local:{source}", byte_tokenizer(), cache_folder=folder / "tokens")
