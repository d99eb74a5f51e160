"""What a cell costs before it runs: memory, time, disk, from shapes and from what was measured. Imports no torch.

Shape letters as in recipe.md. Bytes and seconds everywhere; a GPU-hour is one GPU for 3,600 seconds.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from linear_core.device import nvidia_gpus
from linear_core.evaluate.scores import TaskSpec
from linear_core.models import Shape
from linear_core.recipe import Recipe, parse_layers, share_of_layers
from linear_core.settings import TrainSettings
from sweeps.cell import Cell, Placement

GIB = 1 << 30
# name → (memory in bytes, measured matrix products in FLOP/s, bf16)
GPUS = {
    "h200": (141e9, 784e12),
    "h100": (80e9, 700e12),
    "b200": (180e9, 1.6e15),
    "a100": (80e9, 260e12),
    "l40s": (48e9, 250e12),
    "a10": (24e9, 100e12),
}
CPU_FLOPS_PER_CORE = 48e9  # SmolLM2-135M, 512 tokens forward and backward in 2.9 s on 2 cores
EFFICIENCY = 0.33  # of the matrix-product ceiling: the plain prototype's 8.6k of 26.1k tokens/s at 8B
LARGEST_COPY = 0.6  # of a card's memory for frozen weights: the rest is activations and new parameters
ROWS_OF_LOGITS = 1024  # in memory at a time (linear_core.objectives)
STEP_FLOOR = 0.4e-3  # seconds a layer and step that small models on a GPU cannot go below (launches)
START_SECONDS = 20.0  # a process, its imports and kernels, once a group
# documents and mean tokens of a prompt with prefix reuse, for time estimates only
TASK_TOKENS = {"mmlu": (14042, 112), "lambada_openai": (5153, 85), "hellaswag": (10042, 400), "piqa": (1838, 120),
               "arc_easy": (2376, 160), "arc_challenge": (1172, 180), "winogrande": (1267, 60)}  # fmt: skip
OWN_PASSES = {"perplexity": 1, "agreement": 2, "attribution": 4, "diagnostics": 2}  # forwards over the held-out text


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is to run on. Bytes; price of one GPU for one hour."""

    num_gpus: int = 0
    gpu: str = ""
    gpu_memory: float = 0.0
    num_cpus: int = 1
    num_nodes: int = 1
    memory: float = 0.0
    disk_free: float = 0.0
    price: float | None = None
    is_here: bool = True  # False: planning for another machine, so weights and disk are not looked at

    @classmethod
    def detect(cls, folder: Path | None = None) -> Machine:
        """This machine: GPUs through nvidia-smi (no torch), memory through psutil, disk where results are written."""
        import psutil

        from sweeps.home import home

        target = folder or home()
        while not target.exists():
            target = target.parent
        names, memory = nvidia_gpus()
        return cls(
            num_gpus=len(names), gpu=names[0] if names else "", gpu_memory=memory, num_cpus=os.cpu_count() or 1,
            memory=float(psutil.virtual_memory().total), disk_free=float(shutil.disk_usage(target).free),
        )  # fmt: skip

    @classmethod
    def parse(cls, text: str) -> Machine:
        """``here`` → ``detect()``; ``8xh200`` → so many of a known GPU, elsewhere. Raises ValueError otherwise."""
        if text in ("", "here"):
            return cls.detect()
        match = re.fullmatch(r"(?:(\d+)\s*[x×])?\s*([a-z0-9]+)", text.strip().lower())
        if match is None or match[2] not in GPUS:
            raise ValueError(
                f"machine {text!r} is not known; allowed: here, or a count and one of {', '.join(GPUS)}, e.g. 8xh200"
            )
        memory, _ = GPUS[match[2]]
        return cls(
            num_gpus=int(match[1] or 1), gpu=match[2], gpu_memory=memory, num_cpus=16, memory=128e9, is_here=False
        )

    @property
    def flops(self) -> float:
        """Matrix products of one GPU (bf16), or of all CPU cores (float32), FLOP/s."""
        if not self.num_gpus:
            return self.num_cpus * CPU_FLOPS_PER_CORE
        known = next((flops for name, (_, flops) in GPUS.items() if name in self.gpu.lower()), 100e12)
        return known * EFFICIENCY


@lru_cache(maxsize=4096)
def num_linear_layers(shape: Shape, recipe: Recipe) -> int:
    """Layers whose attention is replaced."""
    if recipe.mechanism == "softmax":
        return 0
    if recipe.softmax_layers.startswith("hardest:"):
        return shape.layers - share_of_layers(float(recipe.softmax_layers.partition(":")[2]), shape.layers)
    return shape.layers - len(parse_layers(recipe.softmax_layers, shape.layers))


@lru_cache(maxsize=4096)
def new_parameters(shape: Shape, recipe: Recipe) -> int:
    """Parameters that a recipe adds, by the formulas of recipe section 3 (a test compares with the converted model)."""
    C, H, G, D = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim
    beta = C * H + H
    per_layer = {
        "hedgehog": (H + G) * (D + 1) * D // 2,
        "gla": C * 16 + 16 * H * D + H * D,
        "kgla": C * 16 + 16 * H * D + H * D + beta,
        "gdn": C * 16 + 16 * H * D + H * D + beta,
        "gdn_scalar": C * 16 + 16 * H + H + beta,
    }.get(recipe.mechanism, 0)
    if recipe.adaptation == "conv":
        per_layer += (H + 2 * G) * D * (recipe.conv_kernel + 1)
    if recipe.adaptation == "lora":
        per_layer += recipe.lora_rank * ((C + H * D) * 2 + (C + G * D) * 2)
    if recipe.merge == "mass":
        per_layer += C * H + H * D
    if recipe.merge == "mass" or recipe.learned_read_scale:
        per_layer += H
    return per_layer * num_linear_layers(shape, recipe)


def cache_bytes(shape: Shape, recipe: Recipe, length: int, *, bytes_per_value: int = 2) -> int:
    """Bytes that decoding one sequence keeps after ``length`` tokens: states (float32), window and sinks, gate inputs,
    convolution tails, and the growing cache of layers that keep softmax."""
    H, G, D = shape.heads, shape.kv_heads, shape.head_dim
    full = 2 * G * D * bytes_per_value * length
    if recipe.mechanism == "softmax":
        return full * shape.layers
    linear = num_linear_layers(shape, recipe)
    key_features = value_features = D
    if recipe.mechanism == "hedgehog":
        value_features = D + 1
    state = 0 if recipe.mechanism == "none" else H * key_features * value_features * 4
    gates = {"gla": 16, "kgla": 16 + H, "gdn": 16 + H, "gdn_scalar": 16 + H}.get(recipe.mechanism, 0) * 4
    exact = min(length, recipe.window + recipe.sinks) * 2 * G * D * bytes_per_value + min(length, recipe.window) * gates
    tail = (recipe.conv_kernel - 1) * (H + 2 * G) * D * bytes_per_value if recipe.adaptation == "conv" else 0
    return linear * (state + exact + tail) + (shape.layers - linear) * full


def weight_bytes(shape: Shape, train: TrainSettings, width: int, spread: int = 1) -> float:
    """Bytes of the frozen weights on one device: layers by the backbone's width, spread over so many devices."""
    layers = shape.layers * shape.layer_parameters
    return layers * (1 if train.backbone == "int8" else width) / spread + (shape.num_parameters - layers) * width


def must_shard(shape: Shape, gpu_memory: float) -> bool:
    """Whether the weights (bfloat16) of a cell on several GPUs are spread over them, not copied to each."""
    return shape.num_parameters * 2 > LARGEST_COPY * gpu_memory


def train_memory(
    shape: Shape, recipe: Recipe, train: TrainSettings, placement: Placement, step_bytes: float | None = None
) -> float:
    """Peak bytes of a training step on one device: frozen weights, new parameters with gradient and Adam, activations,
    logits. Of several GPUs each has its share of the batch, and a copy of the weights.

    step_bytes: what the step of one sequence takes above model and optimiser, where that was measured. Else estimated;
    calibrated on the prototype: LLaMA-3.1-8B, batch 1, T = 4096, no checkpointing: 51 GiB measured, 52 estimated.
    """
    width = 2 if placement.device.startswith("cuda") else 4
    share = max(1, train.batch_size // max(1, int(placement.num_gpus)))
    rows = min(share, placement.micro_batch or share)
    model = weight_bytes(shape, train, width) + new_parameters(shape, recipe) * 16
    if step_bytes is not None:
        return model + rows * step_bytes
    tokens = rows * train.sequence_length
    activations = tokens * shape.layers * width * (20 * shape.hidden + 3 * shape.intermediate)
    logits = tokens * shape.vocab * (width + 8)
    return model + activations + logits


def minimum_memory(shape: Shape, recipe: Recipe, train: TrainSettings, placement: Placement) -> float:
    """The same with one sequence at a time and activation checkpointing, what the trainer falls back to by itself, and
    with layers spread over the GPUs of the cell."""
    width = 2 if placement.device.startswith("cuda") else 4
    tokens = train.sequence_length
    kept = tokens * width * (shape.layers * shape.hidden + 20 * shape.hidden + 3 * shape.intermediate)
    weights = weight_bytes(shape, train, width, max(1, int(placement.num_gpus)) if train.backbone == "full" else 1)
    logits = min(tokens, ROWS_OF_LOGITS) * shape.vocab * (width + 8)
    return weights + new_parameters(shape, recipe) * 16 + kept + logits


def step_bytes_name(machine: Machine, cell: Cell) -> str:
    """Name under which the measured bytes of a training step of one sequence are kept, by base model and length."""
    length = cell.train.sequence_length if cell.train else 0
    return f"step_bytes/{machine.gpu if machine.num_gpus else 'cpu'}/{cell.base}/{cell.revision}/{length}"


def throughput_name(machine: Machine, cell: Cell) -> str:
    """Name under which measured training tokens/s of one device are kept (queries.measure)."""
    length = cell.train.sequence_length if cell.train else 0
    device = machine.gpu if machine.num_gpus else f"cpu{machine.num_cpus}"
    return f"tokens_per_second/{device}/{cell.base}/{cell.recipe.mechanism}/{cell.recipe.adaptation}/{length}"


def tokens_per_second(shape: Shape, train: TrainSettings, machine: Machine, placement: Placement) -> float:
    """Training rate without a measurement: 4 FLOP per multiplied parameter and token, not below a launch-bound step."""
    multiplied = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
    step_tokens = train.batch_size * train.sequence_length
    seconds = step_tokens * 4 * multiplied / (machine.flops * max(1, placement.num_gpus))
    return step_tokens / max(seconds, STEP_FLOOR * shape.layers if machine.num_gpus else 0.0)


def task_seconds(shape: Shape, task: TaskSpec, machine: Machine) -> float:
    """Time to score one task: 2 FLOP per multiplied parameter and prompt token."""
    multiplied = shape.layers * shape.layer_parameters + shape.vocab * shape.hidden
    documents, length = TASK_TOKENS.get(task.name, (500, 1024))
    if task.name in OWN_PASSES:
        documents, length = task.limit or 100_000, OWN_PASSES[task.name]
    elif task.name == "latency":
        documents, length = 4 * 8, task.length or 0  # prefills of eight prompts
    elif task.length:
        documents, length = min(500, task.limit or 500), task.length
    elif task.limit:
        documents = min(documents, task.limit)
    return documents * length * 2 * multiplied / machine.flops
