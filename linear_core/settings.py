"""How a linearized model is trained: one frozen, validated value (recipe section 5). Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

OBJECTIVES = ("ce", "kl", "layerwise")
BACKBONES = ("full", "int8")


def parse_count(text: str | int) -> int:
    """``"10.24M"``, ``"4k"``, ``4096`` → whole number of tokens. Raises ValueError on anything else, nan and inf included."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbB]?)", str(text).strip())
    value = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2].lower()] if match else math.nan
    if not value > 0 or value != round(value):
        raise ValueError(f"{text!r} is no count; allowed: a whole number above 0, or 4k, 1.5M, 10.24M")
    return round(value)


def parse_objective(text: str, tokens: int) -> tuple[tuple[str, int], ...]:
    """``"ce"`` → ``(("ce", tokens),)``; ``"layerwise:1M,ce:9M"`` → a chain whose counts must add up to ``tokens``."""
    parts = [part.partition(":") for part in text.split(",")] if isinstance(text, str) else []
    names = [name.strip() for name, _, _ in parts]
    if not names or any(name not in OBJECTIVES for name in names):
        raise ValueError(
            f"objective {text!r} is not known; allowed: {', '.join(OBJECTIVES)}, or a chain such as layerwise:1M,ce:9M"
        )
    if len(parts) == 1 and not parts[0][1]:
        return ((names[0], tokens),)
    counts = [parse_count(count) for _, _, count in parts]
    if sum(counts) != tokens:
        raise ValueError(f"objective {text!r} adds up to {sum(counts)} tokens, but tokens is {tokens}")
    return tuple(zip(names, counts))


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The paper's recipe unless said otherwise. Token counts are whole; a step is ``batch_size × sequence_length`` tokens.

    ``learning_rate`` 0 means the paper's: 2e-3, and 5e-4 with LoRA. ``backbone``: how the frozen layers are kept, also when
    the cell is measured: ``full`` as loaded, ``int8`` 8-bit weights, half the memory. Raises ValueError naming what is allowed.
    """

    tokens: int = 10_240_000
    sequence_length: int = 4096
    batch_size: int = 1
    learning_rate: float = 0.0
    warmup_steps: int = 100
    objective: str = "ce"
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    final_learning_rate: float = 0.0  # share of the peak that the cosine ends at
    isolate_documents: bool = False
    backbone: str = "full"

    def __post_init__(self) -> None:
        for field in ("tokens", "sequence_length", "batch_size"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise ValueError(f"{field} must be a whole number ≥ 1, not {getattr(self, field)!r}")
        if self.sequence_length < 2:
            raise ValueError("sequence_length must be at least 2: a token has to have a next one")
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be a whole number ≥ 0, not {self.warmup_steps!r}")
        for field in ("learning_rate", "weight_decay", "clip_norm", "final_learning_rate", "beta1", "beta2"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ValueError(f"{field} must be a finite number ≥ 0, not {value!r}")
            object.__setattr__(self, field, float(value))
        if self.clip_norm == 0 or self.beta1 >= 1 or self.beta2 >= 1 or self.final_learning_rate > 1:
            raise ValueError("clip_norm must be above 0, beta1 and beta2 below 1, final_learning_rate at most 1")
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone {self.backbone!r} is not known; allowed: {', '.join(BACKBONES)}")
        parse_objective(self.objective, self.tokens)

    @property
    def num_steps(self) -> int:
        """Optimiser steps; the last one may hold fewer sequences, never fewer tokens than ``tokens`` in all."""
        return math.ceil(self.tokens / (self.batch_size * self.sequence_length))

    def peak_learning_rate(self, adaptation: str) -> float:
        return self.learning_rate or (5e-4 if adaptation == "lora" else 2e-3)

    def canonical(self) -> dict[str, Any]:
        """Fields for keys: tokens, sequence_length and batch_size always, the rest when not the default."""
        always = ("tokens", "sequence_length", "batch_size")
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name in always or getattr(self, f.name) != f.default
        }

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
