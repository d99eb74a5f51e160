"""Base models: name → source, family and shape; load, freeze, fingerprint. Imports torch and transformers only inside functions.

Shape letters: C hidden size, H query heads, G key/value heads, D head dimension (never derived: recipe section 3).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.configuration_utils import PretrainedConfig

# model_type in config.json → the class family that linear_core.convert has an adapter for
FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
REMOTE_CODE = "GOLINEAR_REMOTE_CODE"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers of a decoder that decide its cost. Everything in tokens, heads and features; no bytes."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    max_positions: int
    rope_theta: float
    rms_eps: float
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    attention_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer (norms left out): q, k, v, o and the three of the MLP."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def num_parameters(self) -> int:
        """All parameters, norms included, the embedding once when it is tied."""
        norms = self.layers * (2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)) + self.hidden
        return self.layers * self.layer_parameters + norms + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A base model that can be linearized: where it is and what shape it has."""

    name: str
    source: str  # hub id or folder
    shape: Shape
    licence: str = "unknown"
    gated: bool = False
    published: str = ""  # its name in the reference table, when the paper has it

    @property
    def is_folder(self) -> bool:
        return os.path.isdir(self.source)


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool, max_positions: int = 32768) -> Shape:
    return Shape(
        family="qwen3", hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, intermediate=intermediate,
        vocab=151936, tied=tied, max_positions=max_positions, rope_theta=1e6, rms_eps=1e-6,
    )  # fmt: skip


LLAMA_31_ROPE = (
    ("rope_type", "llama3"), ("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0),
    ("original_max_position_embeddings", 8192),
)  # fmt: skip

REGISTRY: dict[str, BaseModel] = {
    m.name: m
    for m in (
        BaseModel(name="qwen3-0.6b-base", source="Qwen/Qwen3-0.6B-Base", licence="apache-2.0",
                  published="qwen3-0.6b-base", shape=_qwen3(1024, 28, 16, 3072, True)),
        BaseModel(name="qwen3-1.7b-base", source="Qwen/Qwen3-1.7B-Base", licence="apache-2.0",
                  published="qwen3-1.7b-base", shape=_qwen3(2048, 28, 16, 6144, True)),
        BaseModel(name="qwen3-4b-base", source="Qwen/Qwen3-4B-Base", licence="apache-2.0",
                  published="qwen3-4b-base", shape=_qwen3(2560, 36, 32, 9728, True)),
        BaseModel(name="qwen3-8b-base", source="Qwen/Qwen3-8B-Base", licence="apache-2.0",
                  published="qwen3-8b-base", shape=_qwen3(4096, 36, 32, 12288, False)),
        BaseModel(name="qwen3-14b-base", source="Qwen/Qwen3-14B-Base", licence="apache-2.0",
                  published="qwen3-14b-base", shape=_qwen3(5120, 40, 40, 17408, False)),
        BaseModel(name="qwen3-32b", source="Qwen/Qwen3-32B", licence="apache-2.0",
                  published="qwen3-32b", shape=_qwen3(5120, 64, 64, 25600, False, 40960)),
        BaseModel(name="llama3.1-8b", source="meta-llama/Llama-3.1-8B", licence="llama3.1", gated=True,
                  published="llama3.1-8b",
                  shape=Shape(family="llama", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
                              intermediate=14336, vocab=128256, tied=False, max_positions=131072, rope_theta=5e5,
                              rms_eps=1e-5, rope_scaling=LLAMA_31_ROPE)),
        BaseModel(name="smollm2-135m", source="HuggingFaceTB/SmolLM2-135M-Instruct", licence="apache-2.0",
                  shape=Shape(family="llama", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64,
                              intermediate=1536, vocab=49152, tied=True, max_positions=8192, rope_theta=1e5,
                              rms_eps=1e-5)),
    )
}  # fmt: skip


def cache_folder() -> Path:
    """Where converted and generated files are kept: ``GOLINEAR_CACHE``, else ``~/.cache/golinear``."""
    return Path(os.environ.get("GOLINEAR_CACHE") or Path.home() / ".cache" / "golinear")


def local_copy(name: str) -> Path | None:
    """The folder under the cache that holds a model's weights, when it was put there (SmolLM2 from its package)."""
    folder = cache_folder() / "models" / name
    return folder if (folder / "config.json").exists() else None


def resolve(name: str) -> BaseModel:
    """A registry name, a folder with a config.json, or a hub id → BaseModel.

    Raises ValueError for an unknown name (naming the registry), a folder without a config.json, an architecture
    that is not supported, and a model that wants remote code and is not allowed it by name (``may_run_its_code``).
    """
    if name in REGISTRY:
        known = REGISTRY[name]
        folder = local_copy(name)
        if folder is None:
            return known
        return BaseModel(
            name=name, source=str(folder), shape=known.shape, licence=known.licence, published=known.published
        )
    if os.path.isdir(name):
        config = Path(name) / "config.json"
        if not config.exists():
            raise ValueError(
                f"model folder {name!r} has no config.json; allowed: a Hugging Face folder of {_families()}"
            )
        return _from_config(json.loads(config.read_text()), Path(name).resolve().name, str(Path(name).resolve()))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_config(_hub_config(name), name.lower().replace("/", "--"), name)
    raise ValueError(
        f"model {name!r} is not known; allowed: {', '.join(REGISTRY)}, a folder, or a hub id such as Qwen/Qwen3-4B-Base"
    )


def _families() -> str:
    return ", ".join(f"{family} ({cls})" for family, cls in FAMILIES.items())


@cache
def _hub_config(hub_id: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(hub_id, "config.json", etag_timeout=5)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model {hub_id!r}: its config.json could not be read from the hub ({reason})") from error
    return json.loads(Path(path).read_text())


def _from_config(config: dict[str, Any], name: str, source: str) -> BaseModel:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"model {source!r} has architecture {config.get('architectures') or family!r}; supported: {_families()}"
        )
    if config.get("auto_map") and not may_run_its_code(source):
        raise ValueError(
            f"model {source!r} wants to run its own code (auto_map); remote code is off: use the original {family} folder, "
            f"or set {REMOTE_CODE}={source} when you trust it"
        )
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"
    return BaseModel(name=slug, source=source, shape=shape_from(config), licence=str(config.get("license", "unknown")))


def may_run_its_code(source: str) -> bool:
    """Whether ``GOLINEAR_REMOTE_CODE``, a comma list of hub ids and folders, names this model."""
    named = [word.strip() for word in os.environ.get(REMOTE_CODE, "").split(",")]
    return source in named or source in [str(Path(word).resolve()) for word in named if os.path.isabs(word)]


def shape_from(config: dict[str, Any]) -> Shape:
    """The shape that a config.json tells, of a base model or of an export."""
    family = config["model_type"].removeprefix("linearized_")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if rope.get("rope_type", rope.get("type")) in (None, "default"):
        rope = {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else config["hidden_size"] // heads)
    return Shape(
        family=family, hidden=config["hidden_size"], layers=config["num_hidden_layers"], heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads, head_dim=head_dim,
        intermediate=config["intermediate_size"], vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)), max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=float(theta), rms_eps=float(config.get("rms_norm_eps", 1e-6)), rope_scaling=tuple(sorted(rope.items())),
        attention_bias=bool(config.get("attention_bias", False)),
    )  # fmt: skip


def shape_of(config: PretrainedConfig) -> Shape:
    """The shape behind a transformers configuration."""
    return shape_from(config.to_dict())


def config_of(shape: Shape) -> PretrainedConfig:
    """The transformers configuration of a shape, for models without weights at hand (random or meta)."""
    from transformers import LlamaConfig, Qwen3Config

    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[shape.family](
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        vocab_size=shape.vocab, tie_word_embeddings=shape.tied, max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.rms_eps, attention_bias=shape.attention_bias,
        rope_parameters={"rope_theta": shape.rope_theta, "rope_type": "default", **dict(shape.rope_scaling)},
        architectures=[FAMILIES[shape.family]],
    )  # fmt: skip


def build(shape: Shape, *, device: str = "meta", dtype: torch.dtype | None = None, seed: int = 0) -> PreTrainedModel:
    """A frozen model of this shape with no weights (``device="meta"``) or random ones. For counts, plans, benchmarks, tests."""
    import torch
    from transformers import AutoModelForCausalLM

    if device != "meta":
        torch.manual_seed(seed)
    _keep_kernels(device)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape), dtype=dtype or torch.float32, attn_implementation="sdpa"
        )
    return freeze(model)


def _keep_kernels(device: str) -> None:
    """What is compiled for a GPU is kept where it can be packed: asked before anything is."""
    if str(device).startswith("cuda"):
        from linear_core import kernel_archive

        kernel_archive.use()


def load(
    base: BaseModel | str, *, device: str = "cpu", dtype: torch.dtype | None = None, backbone: str = "full"
) -> PreTrainedModel:
    """The frozen base model in eval mode. dtype: bfloat16 on CUDA and float32 elsewhere unless given.

    backbone: ``int8`` keeps the matrices of the decoder layers in 8 bits, a scale for each output feature; embedding and
    head stay whole. Raises ValueError as ``resolve`` and ``check_backbone`` do, OSError when the weights cannot be had.
    """
    import torch
    from transformers import AutoModelForCausalLM

    base = resolve(base) if isinstance(base, str) else base
    _keep_kernels(device)
    dtype = dtype or (torch.bfloat16 if str(device).startswith("cuda") else torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        base.source, dtype=dtype, device_map=None if str(device) == "cpu" else device,
        attn_implementation="sdpa", use_safetensors=True,
        trust_remote_code=may_run_its_code(base.source), **_quantized(backbone),
    )  # fmt: skip
    return freeze(model)


def check_backbone(backbone: str) -> None:
    """Raises ValueError when what it needs is not installed."""
    if backbone == "int8" and importlib.util.find_spec("torchao") is None:
        raise ValueError("backbone int8 needs the package torchao: pip install 'golinear[int8]'; or backbone full")


def _quantized(backbone: str) -> dict[str, Any]:
    check_backbone(backbone)
    if backbone == "full":
        return {}
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig())}


def whole(weight: Any) -> Any:
    """A weight as one can slice and look at it: of 8 bits in the type that it stands for, gathered when it is spread over
    ranks (all of them must ask)."""
    if hasattr(weight, "full_tensor"):
        return weight.full_tensor()
    return weight.dequantize() if hasattr(weight, "qdata") else weight


def load_tokenizer(base: BaseModel | str) -> PreTrainedTokenizerBase:
    """The tokenizer that came with the model, without its code unless that is allowed by name."""
    from transformers import AutoTokenizer

    base = resolve(base) if isinstance(base, str) else base
    return AutoTokenizer.from_pretrained(base.source, trust_remote_code=may_run_its_code(base.source))


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    """Eval mode, no parameter wants a gradient."""
    return model.eval().requires_grad_(False)  # type: ignore[return-value]


def revision(base: BaseModel) -> str:
    """What tells two versions of a base model's weights apart, 16 characters; ``unresolved`` when no weights are at hand.

    A folder: a digest of its config and of a sample of every safetensors file (size, header, 64 blocks of 4 KiB),
    so that a 60 GB model costs milliseconds. A hub id: the commit in the local cache, else the hub's.
    """
    if base.is_folder:
        return folder_revision(base.source)
    from huggingface_hub import constants

    ref = Path(constants.HF_HUB_CACHE) / f"models--{base.source.replace('/', '--')}" / "refs" / "main"
    if ref.exists():
        return ref.read_text().strip()[:16]
    return "unresolved"


@cache
def folder_revision(folder: str) -> str:
    """See ``revision``. Raises OSError without a config.json."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, 1 << 24)))
            for i in range(64):
                file.seek(max(0, size - 4096) * i // 63)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]
