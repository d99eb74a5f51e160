"""Held-out text in windows: perplexity, and agreement of a linearized model with its base (recipe section 6).

Both read the same windows, and a model's final hidden states on them are kept: the base's are made once a machine
(a small file, since the output head is frozen and shared), a model's own are reused between the two tasks.

Shape letters: W windows, L tokens of a window, C hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor

from linear_core.evaluate.offline import digest, read_rows, task_files
from linear_core.evaluate.scores import TaskSpec
from linear_core.evaluate.tasks import DEFAULT_WINDOW, TASKS, sample_items
from linear_core.models import cache_folder, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
BaseOrReference = Union["PreTrainedModel", Path, None]
MOST_TOKENS = 4096  # tokens of a forward pass on the CPU; eight times as many on CUDA


@dataclass(frozen=True)
class Windows:
    """Token windows [W, L] int64 from held-out documents; ``names`` says where each is from."""

    tokens: Tensor
    names: tuple[str, ...]

    @property
    def key(self) -> str:
        """16 hex digits that tell two sets of windows apart."""
        return hashlib.sha256(repr(self.tokens.shape).encode() + self.tokens.numpy().tobytes()).hexdigest()[:16]

    def __getitem__(self, some: slice) -> Windows:
        return Windows(self.tokens[some], self.names[some])


def heldout_windows(task: TaskSpec, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """The windows a task asks for: disjoint, of ``task.length`` tokens, a seeded sample over the documents.

    ``task.limit`` counts tokens: it is cut down to whole windows (one shorter window when it is less than one). Raises
    ValueError when no document is long enough; OSError or what the hub client raises when the text cannot be had.
    """
    length = task.length or DEFAULT_WINDOW
    if task.limit is not None:
        length = min(length, task.limit)
    documents = _documents(tokenizer)
    sizes = {name: len(tokens) // length for name, tokens in documents.items()}
    if not any(sizes.values()):
        raise ValueError(f"{task.name}: no held-out document has {length} tokens; allowed: a shorter length")
    chosen = sample_items(sizes, task.limit // length if task.limit else None, task.seed)
    cut = [(name, documents[name][i * length : (i + 1) * length]) for name, items in chosen.items() for i in items]
    return Windows(torch.tensor([tokens for _, tokens in cut]), tuple(name for name, _ in cut))


def _documents(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    files = task_files(TASKS["perplexity"])
    if files:
        return _file_documents(tokenizer, str(files[0]), digest(files[0]))
    return _hub_documents(tokenizer)


@lru_cache(maxsize=4)
def _file_documents(tokenizer: PreTrainedTokenizerBase, path: str, _digest: str) -> dict[str, list[int]]:
    rows = read_rows(Path(path))
    encoded = tokenizer([row["text"] for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
    return {row.get("id", str(i)): tokens for i, (row, tokens) in enumerate(zip(rows, encoded))}


@lru_cache(maxsize=2)
def _hub_documents(tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    import datasets

    pages = datasets.load_dataset(TASKS["perplexity"].hub, "wikitext-2-raw-v1", split="test")["page"]
    encoded = tokenizer(list(pages), add_special_tokens=False)["input_ids"]
    return {str(i): tokens for i, tokens in enumerate(encoded)}


_own: weakref.WeakKeyDictionary[Any, dict[Any, Tensor]] = weakref.WeakKeyDictionary()


def hidden_states(model: PreTrainedModel, windows: Windows, switches: dict[str, Any] | None = None) -> Tensor:
    """What the output head reads at each token: [W, L, C] on the CPU, kept until the model changes."""
    # conversion is in place and `none` adds no parameter: the recipe tells such a model from its base
    parameters = tuple((p.data_ptr(), p._version) for p in model.parameters())
    version = (type(model).__name__, getattr(model, "recipe", None), parameters)
    key = (windows.key, tuple(sorted((switches or {}).items())), version)
    kept = _own.setdefault(model, {})
    if key not in kept:
        for old in [k for k in kept if k[2] != version]:
            del kept[old]
        kept[key] = _run(model, windows.tokens, switches or {})
    return kept[key]


@torch.inference_mode()
def _run(model: PreTrainedModel, tokens: Tensor, switches: dict[str, Any]) -> Tensor:
    seen: list[Tensor] = []

    def take(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0].cpu())
        return (args[0][:, -1:], *args[1:])  # the head itself has nothing to do here

    rows = max(1, MOST_TOKENS * (1 if model.device.type == "cpu" else 8) // tokens.shape[1])
    handle = model.get_output_embeddings().register_forward_pre_hook(take)
    try:
        for part in tokens.split(rows):
            model(
                input_ids=part.to(model.device),
                **({} if hasattr(model, "new_cache") else {"use_cache": False}),
                **switches,
            )
    finally:
        handle.remove()
    return torch.cat(seen)


@torch.inference_mode()
def _log_probs(model: PreTrainedModel, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(positions, log-probabilities [n, V] float32 on the model's device) of hidden states [N, C], piece by piece."""
    head = model.get_output_embeddings()
    size = max(64, (1 << 27) // head.weight.shape[0] // (1 if model.device.type == "cuda" else 4))
    for start in range(0, len(hidden), size):
        part = hidden[start : start + size].to(model.device)
        yield slice(start, start + len(part)), head(part).float().log_softmax(-1)


def token_losses(model: PreTrainedModel, windows: Windows, switches: dict[str, Any] | None = None) -> Tensor:
    """Negative log-likelihood in nats of each token but a window's first: [W, L − 1] float32."""
    hidden = hidden_states(model, windows, switches)[:, :-1].flatten(0, 1)
    target = windows.tokens[:, 1:].flatten()
    losses = torch.empty(len(target))
    for where, log_probs in _log_probs(model, hidden):
        losses[where] = -log_probs.gather(1, target[where, None].to(log_probs.device))[:, 0].cpu()
    return losses.view(len(windows.tokens), -1)


def agreement(
    model: PreTrainedModel, base: Tensor, windows: Windows, switches: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor]:
    """(same most likely token, KL(base ‖ model) in nats) at each position: both [W, L] float32.

    base: the base model's hidden states [W, L, C] on the same windows; its output head is the model's own, frozen.
    """
    shape = windows.tokens.shape
    hidden = hidden_states(model, windows, switches).flatten(0, 1)
    reference = base.flatten(0, 1)
    if torch.equal(hidden, reference):  # the base itself
        return torch.ones(shape), torch.zeros(shape)
    same, kl = torch.empty(len(hidden)), torch.empty(len(hidden))
    for (where, ours), (_, theirs) in zip(_log_probs(model, hidden), _log_probs(model, reference)):
        same[where] = (ours.argmax(-1) == theirs.argmax(-1)).float().cpu()
        kl[where] = (theirs.exp() * (theirs - ours)).sum(-1).clamp_min(0).cpu()
    return same.view(shape), kl.view(shape)


def base_fingerprint(model: PreTrainedModel) -> str:
    """16 hex digits over samples of weights that linearization leaves alone: a base and its conversions share them."""
    digest = hashlib.sha256(str(model.dtype).encode())
    for name, parameter in sorted(model.named_parameters()):
        if ".mlp." in name or "embed_tokens" in name or "layernorm" in name or name.endswith("model.norm.weight"):
            flat = whole(parameter.detach()).flatten()
            digest.update(flat[:: max(1, len(flat) // 64)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def base_reference(model: PreTrainedModel, windows: Windows, given: BaseOrReference = None) -> Tensor:
    """The base model's hidden states on the windows: from a file when it is there, else made and kept for next time.

    given: the base model, or the folder of the files (default: in the cache). Without it a linearized model runs its
    own frozen layers with the base's attention, which is the base model bit for bit. Raises ValueError when another
    model is given.
    """
    from safetensors.torch import load_file

    folder = given if isinstance(given, Path) else cache_folder() / "references"
    path = folder / f"{base_fingerprint(model)}-{windows.key}.safetensors"
    if path.exists():
        return load_file(path)["hidden"]
    if given is not None and not isinstance(given, Path):
        if base_fingerprint(given) != base_fingerprint(model):
            raise ValueError("the base model given is not the one this model was converted from: frozen weights differ")
        hidden = hidden_states(given, windows)
    elif hasattr(model, "recipe"):
        from linear_core.convert import base_attention

        with base_attention(model):
            hidden = hidden_states(model, windows, {"paths": "base"})
    else:
        hidden = hidden_states(model, windows)
    _save(hidden, path)
    return hidden


def _save(hidden: Tensor, path: Path) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(handle)
    save_file({"hidden": hidden.contiguous()}, scratch)
    os.replace(scratch, path)  # whole or not at all, whoever else is writing it


def mean_of(values: Tensor) -> tuple[float, float | None]:
    """Mean over all tokens of [W, L], and its standard error with the window as the unit (None for a single window)."""
    means = values.double().mean(1)
    return float(means.mean()), float(means.std() / math.sqrt(len(means))) if len(means) > 1 else None
