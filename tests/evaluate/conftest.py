"""A tiny model with a byte-level tokenizer, and SmolLM2 where its weights are in the cache."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linear_core.models import REGISTRY, Shape, build, load, load_tokenizer, local_copy

TINY = Shape(
    family="llama", hidden=48, layers=3, heads=4, kv_heads=2, head_dim=16, intermediate=64, vocab=320, tied=False,
    max_positions=8192, rope_theta=1e4, rms_eps=1e-5,
)  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level, 256 bytes and an end token: any text, no download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], unk_token=None))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", name_or_path="bytes")


@pytest.fixture(scope="session")
def tiny():
    """A frozen random llama with weights large enough that its answers are decided."""
    model = build(TINY, device="cpu", seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="session")
def tiny_qwen():
    return build(replace(TINY, family="qwen3", tied=True), device="cpu", seed=4)


@pytest.fixture(scope="session")
def data_folder():
    """The folder of ``GOLINEAR_DATA``; tests that read its files are skipped without it."""
    given = os.environ.get("GOLINEAR_DATA")
    if not given or not (Path(given) / "mmlu_test.jsonl.gz").exists():
        pytest.skip("GOLINEAR_DATA is not set to a folder with the evaluation data")
    return Path(given)


@pytest.fixture(scope="session")
def smollm2():
    if local_copy("smollm2-135m") is None:
        pytest.skip("SmolLM2-135M is not in the cache (make up puts it there)")
    return load(REGISTRY["smollm2-135m"].name), load_tokenizer("smollm2-135m")
