"""A cell of a study: what is computed, and the keys that name it for ever. Imports no torch.

Identity is kept apart from execution: base weights, recipe, training, data and seed decide a result and make the key;
where and how it ran (``Placement``: GPUs, micro-batch, paths) never does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from linear_core.evaluate.scores import TaskSpec
from linear_core.recipe import Recipe
from linear_core.settings import TrainSettings, parse_objective

# Bumped by hand when results of the same inputs change: a mechanism's arithmetic, the trainer, the evaluator.
MECHANISM_VERSIONS: dict[str, int] = {}  # 1 unless named here
TRAINER_VERSION = 1
EVALUATOR_VERSION = 1

SOFTMAX = Recipe(mechanism="softmax", window=0, sinks=0)
MAX_NAME = 96  # characters of the readable part of a key


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a cell runs. Never part of a key; recorded as provenance."""

    num_gpus: float = 0  # a whole number, or the share of one GPU that cells have in common
    num_cpus: int = 1
    device: str = ""  # "" → cuda when num_gpus > 0, else cpu
    micro_batch: int | None = None  # sequences in one forward; None: the whole batch
    checkpoint_minutes: float = 2.0  # at most this much work is lost when a process dies
    source: str = "auto"  # where the training text is read from (linear_core.data); its *content* is Cell.data

    def __post_init__(self) -> None:
        if type(self.num_cpus) is not int or self.num_cpus < 0:
            raise ValueError(f"num_cpus must be a whole number ≥ 0, not {self.num_cpus!r}")
        whole = type(self.num_gpus) in (int, float) and self.num_gpus >= 0 and self.num_gpus == self.num_gpus // 1
        if not whole and not (type(self.num_gpus) is float and 0 < self.num_gpus < 1):
            raise ValueError(f"num_gpus must be a whole number ≥ 0 or a share of one GPU such as 0.25, not {self.num_gpus!r}")
        if whole:
            object.__setattr__(self, "num_gpus", int(self.num_gpus))
        if self.micro_batch is not None and (type(self.micro_batch) is not int or self.micro_batch < 1):
            raise ValueError(f"micro_batch must be a whole number ≥ 1 or None, not {self.micro_batch!r}")
        if not self.device:
            object.__setattr__(self, "device", "cuda" if self.num_gpus else "cpu")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Base model × recipe × training × data × seed. ``train=None`` is the unconverted base model itself.

    ``base`` is a registry name, a hub id or the absolute path of a folder; a path says where, so it is not in the key.
    ``revision`` (of the weights) and ``data`` (fingerprint of the training text) are empty until ``grids.pin`` has
    looked them up; a key of a cell that is not pinned raises ValueError.
    """

    base: str
    recipe: Recipe
    train: TrainSettings | None
    revision: str = ""
    data: str = ""
    seed: int = 1

    def __post_init__(self) -> None:
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"seed must be a whole number ≥ 0, not {self.seed!r}")
        if (self.train is None) != (self.recipe.mechanism == "softmax"):
            raise ValueError(
                "a cell with mechanism softmax is the base model: train must be None for it, and only for it"
            )

    @classmethod
    def base_model(cls, base: str, revision: str = "") -> Cell:
        """The unconverted model as a cell: nothing to train, the same for every data set and seed."""
        return cls(base=base, recipe=SOFTMAX, train=None, revision=revision, data="", seed=0)

    def base_of(self) -> Cell:
        """The unconverted model that this cell is measured against."""
        return self if self.is_base else Cell.base_model(self.base, self.revision)

    @property
    def is_base(self) -> bool:
        return self.train is None

    @property
    def backbone(self) -> str:
        """How its frozen layers are kept (TrainSettings.backbone); the base model is measured as it is."""
        return self.train.backbone if self.train else "full"

    @property
    def batches(self) -> tuple[Any, ...]:
        """Base model, text, settings and seed: cells that have these in common may train in one pass over the same batches."""
        return self.base, self.revision, self.train, self.data, self.seed

    @property
    def label(self) -> str:
        """For people, e.g. ``smollm2-135m gdn 56+8 conv s1``; ``smollm2-135m base`` for the unconverted model."""
        return self._named(self.base_label)

    @property
    def base_label(self) -> str:
        """The base model's name for people: of a folder the last part."""
        return self.base.rsplit("/", 1)[-1] if self._is_folder else self.base

    @property
    def _is_folder(self) -> bool:
        return self.base.startswith("/")

    @property
    def _name(self) -> str:
        """As ``label``, for keys: a folder is called by the revision of its weights."""
        return self._named(f"local-{self.revision[:8]}" if self._is_folder else self.base)

    def _named(self, base: str) -> str:
        return f"{base} base" if self.is_base else f"{base} {self.recipe.name} s{self.seed}"

    @property
    def setting(self) -> str:
        """Key of everything but the seed: cells that share it are repeats, and only they are averaged."""
        return key_of(self._name.removesuffix(f" s{self.seed}"), {**self.inputs, "seed": None})

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """Everything that decides the trained parameters, in canonical form. Raises ValueError when not pinned."""
        if not self.revision or (self.train is not None and not self.data):
            raise ValueError(
                f"cell {self.label!r} is not pinned: its base revision and data are not known yet (grids.pin)"
            )
        train = None if self.train is None else train_inputs(self.train, self.recipe)
        version = MECHANISM_VERSIONS.get(self.recipe.mechanism, 1)
        science = {"mechanism": version} if train is None else {"mechanism": version, "trainer": TRAINER_VERSION}
        return {
            "base": "local" if self._is_folder else self.base,
            "revision": self.revision,
            "recipe": recipe_inputs(self.recipe),
            "train": train,
            "data": self.data,
            "seed": self.seed,
            "science": science,
        }

    @cached_property
    def train_key(self) -> str:
        """Readable name and 16 hex of sha256 over ``inputs``; characters ``[a-z0-9_-]``."""
        return key_of(self._name, self.inputs)

    def score_key(self, task: TaskSpec, *, source: str = "", harness: str = "") -> str:
        """Key of one task's scores on this cell: train_key + task + where its data came from + harness version."""
        inputs = {
            "train_key": self.train_key,
            "task": _task_inputs(task),
            "source": source,
            "harness": harness,
            "science": {"evaluator": EVALUATOR_VERSION},
        }
        return key_of(f"{self._name}-{task.label}", inputs)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        train = None if data["train"] is None else TrainSettings(**data["train"])
        return cls(**{**data, "recipe": Recipe(**data["recipe"]), "train": train})


@lru_cache(maxsize=4096)
def recipe_inputs(recipe: Recipe) -> dict[str, Any]:
    """The recipe's fields that can change this model: what its mechanism and adaptation do not read is left out."""
    inputs = {k: float(v) if k == "gate_bias" else v for k, v in recipe.canonical().items()}
    unread = set()
    if recipe.mechanism == "softmax":
        unread |= set(inputs) - {"mechanism"}
    if recipe.adaptation != "lora":
        unread |= {"lora_rank", "lora_alpha"}
    if recipe.adaptation != "conv":
        unread |= {"conv_kernel"}
    if recipe.mechanism in ("none", "hedgehog"):
        unread |= {"gate_bias"}
    return {k: v for k, v in inputs.items() if k not in unread}


@lru_cache(maxsize=4096)
def train_inputs(train: TrainSettings, recipe: Recipe) -> dict[str, Any]:
    """Training settings as they act: the learning rate that is used, the objective as a chain with its token counts."""
    inputs = train.canonical()
    inputs["learning_rate"] = train.peak_learning_rate(recipe.adaptation)
    inputs["objective"] = [[name, tokens] for name, tokens in parse_objective(train.objective, train.tokens)]
    return inputs


_task_inputs = lru_cache(maxsize=4096)(TaskSpec.canonical)


def canonical(value: Any, where: str = "value") -> Any:
    """A copy with keys sorted and only str, int, bool, None, finite float, list and dict in it.

    Raises TypeError on anything else (sets, paths, arrays, nan, inf, keys that are not strings), naming where it stood.
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value) + 0.0  # −0.0 → 0.0
    if isinstance(value, (list, tuple)):
        return [canonical(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: canonical(value[key], f"{where}.{key}") for key in sorted(value)}
    raise TypeError(f"{where} = {value!r} ({type(value).__name__}) has no canonical form for a key")


def digest(inputs: dict[str, Any]) -> str:
    """16 hex of sha256 over the canonical form: compact JSON, keys sorted, floats by repr."""
    text = json.dumps(canonical(inputs), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slug(text: str) -> str:
    """Lower case with every other character than ``[a-z0-9_]`` as a single hyphen, cut at ``MAX_NAME``."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower())[:MAX_NAME].strip("-")


def key_of(name: str, inputs: dict[str, Any]) -> str:
    return f"{slug(name)}-{digest(inputs)}"


def diff(a: Cell, b: Cell) -> list[str]:
    """What differs between two cells, a line each: ``train.learning_rate 0.002 → 0.001``. Empty for the same cell."""
    left, right = _flat(a.inputs), _flat(b.inputs)
    names = [*left, *(name for name in right if name not in left)]
    return [
        f"{name} {_shown(left, name)} → {_shown(right, name)}"
        for name in names
        if left.get(name, _ABSENT) != right.get(name, _ABSENT)
    ]


_ABSENT = object()


def _shown(values: dict[str, Any], name: str) -> str:
    return "(default)" if name not in values else str(values[name])


def _flat(inputs: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in inputs.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
