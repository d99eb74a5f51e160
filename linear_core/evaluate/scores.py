"""A task asked for and a score given back: frozen values that travel between processes. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One thing to measure. All fields are part of a score's identity."""

    name: str  # mmlu, lambada_openai, niah_single_1, perplexity, agreement, …
    limit: int | None = None  # items (documents; tokens for perplexity and agreement); None: all
    shots: int | None = None  # None: the task's own number
    length: int | None = None  # prompt length in tokens, for RULER
    seed: int = 0  # of the sample that a limit takes and of generated tasks

    @property
    def label(self) -> str:
        return self.name if self.length is None else f"{self.name}@{self.length}"

    def canonical(self) -> dict[str, Any]:
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task, or the reason why there is none. Never 0 or −1 for "missing"."""

    task: TaskSpec
    metric: str  # acc, acc_norm, perplexity, kl, …
    value: float | None = None
    stderr: float | None = None
    samples: int | None = None
    reason: str = ""  # why value is None, and how to get it
    source: str = ""  # where the data came from: hub, or the GOLINEAR_DATA file and its digest
    harness: str = ""  # lm-eval 0.4.13, golinear 0.1.0
    seconds: float | None = None
    flags: tuple[str, ...] = ()  # chance-level, constant, …
    details: dict[str, Any] = field(default_factory=dict)  # per-item results and raw harness output, for artifacts

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.reason):
            raise ValueError(f"a score has a value or a reason, not both or neither: {self.task.label} {self.metric}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Score:
        return cls(**{**data, "task": TaskSpec(**data["task"]), "flags": tuple(data["flags"])})
