"""What a linearized model is: one frozen, validated, hashable value (recipe section 2 to 4 and 7). Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

from linear_core.mechanisms import MECHANISMS

ADAPTATIONS = ("none", "conv", "lora")
MERGES = ("sum", "shared", "mass")


def parse_budget(text: str) -> tuple[int, int]:
    """``"56+8"`` → ``(56, 8)``: window (the current token included) and sinks.

    Raises ValueError when the text is not ``w+s`` with whole numbers ≥ 0, or has sinks without a window.
    """
    match = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"budget {text!r} is not of the form window+sinks with whole numbers ≥ 0; allowed: 56+8, 64+0, 0+0, …"
        )
    window, sinks = int(match[1]), int(match[2])
    if sinks and not window:
        raise ValueError(
            f"budget {text!r} has sinks but no window; allowed: sinks only with a window of at least 1 (e.g. 56+8)"
        )
    return window, sinks


def parse_layers(text: str, num_layers: int) -> frozenset[int]:
    """Which layers keep softmax attention, for the specifications that need no measurement.

    ``none`` · ``uniform:0.2`` (that share, evenly spaced) · ``list:0,5,9``. ``hardest:0.2`` is resolved to a ``list:``
    by ``linear_core.diagnostics.hardest_layers`` before a model is converted. Raises ValueError with what is allowed.
    """
    kind, value = _split_layers(text)
    if kind == "none":
        return frozenset()
    if kind == "list":
        chosen = frozenset(int(i) for i in value.split(","))
        if outside := sorted(i for i in chosen if i >= num_layers):
            raise ValueError(f"softmax_layers {text!r} names layers {outside}; the model has 0 … {num_layers - 1}")
        return chosen
    if kind == "uniform":
        count = share_of_layers(float(value), num_layers)
        return frozenset(int((i + 0.5) * num_layers / count) for i in range(count))
    raise ValueError(
        f"softmax_layers {text!r} must be resolved to a list first (linear_core.diagnostics.hardest_layers)"
    )


def share_of_layers(share: float, num_layers: int) -> int:
    """Number of layers that a share in (0, 1] stands for: rounded, at least one."""
    return max(1, round(share * num_layers))


def _split_layers(text: str) -> tuple[str, str]:
    kind, _, value = text.partition(":") if isinstance(text, str) else ("", "", "")
    fine = (
        (kind == "none" and not value)
        or (kind == "list" and re.fullmatch(r"\d+(,\d+)*", value))
        or (kind in ("uniform", "hardest") and re.fullmatch(r"0?\.\d+|1(\.0*)?", value) and float(value) > 0)
    )
    if not fine:
        raise ValueError(f"softmax_layers {text!r} is not known; allowed: none, uniform:0.2, list:0,5,9, hardest:0.2")
    if kind == "list":
        return kind, ",".join(map(str, sorted({int(i) for i in value.split(",")})))
    return kind, f"{float(value):g}" if value else ""


def _number(word: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{word} in a recipe wants a number behind it, e.g. '{word} 3', not {value!r}") from None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Mechanism, fixed budget of exact attention, adaptation and merge of a linearized model.

    A default never changes its meaning: keys are built from ``canonical()``, which leaves defaults out, so that
    a field added later moves no key. Raises ValueError on anything that is not allowed, naming what is.
    """

    mechanism: str = "gdn"
    window: int = 56
    sinks: int = 8
    adaptation: str = "none"
    merge: str = ""  # "" → shared for hedgehog with a budget, else sum
    softmax_layers: str = "none"
    gate_bias: float = 1.0
    learned_read_scale: bool = False
    lora_rank: int = 8
    lora_alpha: int = 16
    conv_kernel: int = 8

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS:
            raise ValueError(f"mechanism {self.mechanism!r} is not known; allowed: {', '.join(MECHANISMS)}")
        if self.adaptation not in ADAPTATIONS:
            raise ValueError(f"adaptation {self.adaptation!r} is not known; allowed: {', '.join(ADAPTATIONS)}")
        for field in ("window", "sinks"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 0:
                raise ValueError(f"{field} must be a whole number ≥ 0, not {getattr(self, field)!r}")
        for field in ("lora_rank", "lora_alpha", "conv_kernel"):
            if type(getattr(self, field)) is not int or getattr(self, field) < 1:
                raise ValueError(f"{field} must be a whole number ≥ 1, not {getattr(self, field)!r}")
        if not isinstance(self.gate_bias, (int, float)) or not math.isfinite(self.gate_bias):
            raise ValueError(f"gate_bias must be a finite number, not {self.gate_bias!r}")
        parse_budget(self.budget)
        layers = ":".join(filter(None, _split_layers(self.softmax_layers)))  # one spelling: it is part of keys
        object.__setattr__(self, "softmax_layers", layers)
        if not self.merge:
            shared = self.mechanism == "hedgehog" and self.window > 0
            object.__setattr__(self, "merge", "shared" if shared else "sum")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.merge not in MERGES:
            raise ValueError(f"merge {self.merge!r} is not known; allowed: {', '.join(MERGES)}")
        if self.mechanism == "softmax":
            if self.adaptation != "none" or self.softmax_layers != "none":
                raise ValueError(
                    "mechanism softmax keeps the base model's attention: adaptation and softmax_layers must be none"
                )
            return
        if self.mechanism == "none":
            if self.window == 0:
                raise ValueError("mechanism none has the exact path only: it needs a window (e.g. budget 56+8)")
            if self.adaptation == "conv":
                raise ValueError("mechanism none has no linear path for a convolution; allowed adaptations: none, lora")
            if self.merge != "sum":
                raise ValueError("mechanism none has nothing to merge; allowed merge: sum")
        if self.mechanism == "hedgehog" and self.merge == "sum" and self.window > 0:
            raise ValueError(
                "hedgehog with a window needs merge shared or mass: its read is normalised (recipe section 3)"
            )
        if self.mechanism != "hedgehog" and self.merge == "shared":
            raise ValueError("merge shared is hedgehog's; allowed here: sum, mass")
        if self.merge == "shared" and self.window == 0:
            raise ValueError(
                "merge shared needs an exact path; with budget 0+0 hedgehog normalises by itself (merge sum)"
            )

    @property
    def budget(self) -> str:
        """Window and sinks as the field writes them, e.g. ``56+8``."""
        return f"{self.window}+{self.sinks}"

    @property
    def name(self) -> str:
        """Readable name: what differs from the plain case, in a fixed order, e.g. ``gdn 56+8 conv``."""
        if self.mechanism == "softmax":
            return "softmax"
        parts = [self.mechanism, self.budget]
        if self.adaptation != "none":
            parts.append(self.adaptation)
        if self.merge == "mass":
            parts.append("mass")
        if self.softmax_layers != "none":
            parts.append(f"softmax {self.softmax_layers}")
        if self.gate_bias != 1.0:
            parts.append(f"gate-bias {self.gate_bias:g}")
        if self.learned_read_scale:
            parts.append("read-scale")
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """``"gdn 56+8 conv mass"`` → Recipe. Mechanism first; what ``name`` writes in any order after it: budget,
        adaptation, merge, the layers that keep softmax attention (``hardest:0.2``), ``gate-bias 3``, ``read-scale``.
        Raises ValueError naming what is allowed."""
        words = iter(text.split())
        mechanism = next(words, None)
        if mechanism is None:
            raise ValueError(
                "an empty recipe; allowed: 'mechanism [window+sinks] [adaptation] [merge] [layers]', e.g. 'gdn 56+8 conv'"
            )
        values: dict[str, Any] = {"mechanism": mechanism}
        for word in words:
            if "+" in word:
                values["window"], values["sinks"] = parse_budget(word)
            elif word in ADAPTATIONS:
                values["adaptation"] = word
            elif word in MERGES:
                values["merge"] = word
            elif ":" in word:
                values["softmax_layers"] = word
            elif word == "softmax":
                continue  # as ``name`` writes it, before the layers
            elif word == "gate-bias":
                values["gate_bias"] = _number(word, next(words, ""))
            elif word == "read-scale":
                values["learned_read_scale"] = True
            else:
                raise ValueError(
                    f"{word!r} in recipe {text!r} is not known; allowed: a budget such as 56+8, "
                    f"adaptations {', '.join(ADAPTATIONS)}, merges {', '.join(MERGES)}, "
                    "layers that keep softmax attention such as uniform:0.2, list:0,5,9, hardest:0.2, gate-bias 3, read-scale"
                )
        return cls(**values)

    def canonical(self) -> dict[str, Any]:
        """The fields that make this recipe what it is, for keys: mechanism, budget and adaptation always, the rest
        when it is not the default."""
        always = ("mechanism", "window", "sinks", "adaptation", "merge")
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name in always or getattr(self, f.name) != f.default
        }

    def to_dict(self) -> dict[str, Any]:
        """All fields, for config.json and artifacts; ``Recipe(**recipe.to_dict())`` is the same value."""
        return dataclasses.asdict(self)
