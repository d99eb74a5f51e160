"""Why some layers are hard to linearize (recipe section 6): error of a layer, concentration of its keys, residual.

All on the frozen base model's own inputs, streamed over text: memory does not grow with its length.

Shape letters: B sequences, T tokens, C hidden size, G key/value heads, D head dimension, N layers.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linear_core.adaptation import set_lora
from linear_core.attention import LinearizedAttention
from linear_core.convert import attention_modules, base_attention
from linear_core.evaluate.tasks import MOST_DIAGNOSED
from linear_core.layout import make_layout
from linear_core.recipe import Recipe, share_of_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from linear_core.data import TokenData

MOST_TOKENS = MOST_DIAGNOSED  # of a sequence: the Gram matrix is T × T a head
NUM_BINS = 40
CRITERIA = ("keys", "nmse")
SMOOTH, FLOOR = 16, 1e-5  # tokens of a running mean; the smallest nMSE that a figure shows
KIND_NAMES = {"concentration": "key concentration", "residual": "projection residual"}
HARDNESS_TOKENS, HARDNESS_LENGTH = 32_768, 512  # of held-out text that ranks layers by hardness


def unit_keys(k: Tensor) -> Tensor:
    """k: [B, T, G, D] → unit keys [B, G, T, D] float32."""
    k = k.transpose(1, 2).float()
    return k * torch.rsqrt(k.square().sum(-1, keepdim=True).clamp_min(1e-24))


def concentration_and_residual(keys: Tensor) -> tuple[Tensor, Tensor]:
    """C_t = cos(k̃_t, k̄_t) and R_t = mean_{i ≤ t} |k̃_i·k̄_t/‖k̄_t‖ − ‖k̄_t‖|, with k̄_t the running mean of unit keys.

    keys: [..., T, D] unit norm → (C, R), both [..., T]. Exact, from the Gram matrix: T² numbers a head.
    """
    length = keys.shape[-2]
    count = torch.arange(1, length + 1, device=keys.device, dtype=keys.dtype)
    towards = (keys @ keys.transpose(-1, -2)).cumsum(-1) / count  # [..., i, t]: k̃_i · k̄_t
    past = torch.ones(length, length, device=keys.device, dtype=torch.bool).triu()  # i ≤ t
    norm = ((towards * past).sum(-2) / count).clamp_min(1e-24).sqrt()  # ‖k̄_t‖² is the mean of k̃_i · k̄_t over i ≤ t
    concentration = towards.diagonal(dim1=-2, dim2=-1) / norm
    off = (towards / norm[..., None, :] - norm[..., None, :]).abs()
    return concentration, (off * past).sum(-2) / count


@dataclass
class _Layer:
    """Running sums of one layer, float64. Positions: [T]; bins: [NUM_BINS] of sums and counts."""

    squared: Tensor  # Σ over sequences and channels of (y_full − y_lin)², a position
    concentration: Tensor
    residual: Tensor
    by_concentration: Tensor  # [2, NUM_BINS]: Σ squared error a channel, tokens
    by_residual: Tensor
    total: float = 0.0  # Σ y_full
    total_squared: float = 0.0
    entries: int = 0  # tokens × channels

    @classmethod
    def empty(cls, length: int) -> _Layer:
        position = lambda: torch.zeros(length, dtype=torch.float64)  # noqa: E731
        bins = lambda: torch.zeros(2, NUM_BINS, dtype=torch.float64)  # noqa: E731
        return cls(position(), position(), position(), bins(), bins())

    @property
    def variance(self) -> float:
        """Of y_full over tokens and channels."""
        mean = self.total / self.entries
        return self.total_squared / self.entries - mean * mean


@dataclass(frozen=True)
class Diagnostics:
    """What was measured; arrays are [N] or [N, T] lists. ``nmse`` fields are None for a base model without conversion.

    ``hardness``: mean of a layer's ranks of (−C, R), higher is harder.
    """

    layers: list[int]
    concentration: list[float]
    residual: list[float]
    hardness: list[float]
    nmse: list[float] | None
    position_concentration: list[list[float]]
    position_residual: list[list[float]]
    position_nmse: list[list[float]] | None
    bins: dict[str, list[dict[str, float]]]  # "concentration", "residual": centre, nmse, tokens of every bin that has any
    tokens: int

    def hardest(self, share: float, by: str = "keys") -> tuple[int, ...]:
        """The hardest layers, ascending: ``keys`` by C and R, ``nmse`` by error. Ties go to the lower layer."""
        if by not in CRITERIA:
            raise ValueError(f"criterion {by!r} is not known; allowed: {', '.join(CRITERIA)}")
        values = self.hardness if by == "keys" else self.nmse
        if values is None:
            raise ValueError("ranking by nmse needs a linearized model: its error against the base is what is ranked")
        order = sorted(range(len(self.layers)), key=lambda i: (-values[i], self.layers[i]))
        return tuple(sorted(self.layers[i] for i in order[: share_of_layers(share, len(self.layers))]))

    def map(self) -> dict[str, Any]:
        """layers [N], positions [P] as (first token, token after the last) in growing bins, nmse [N, P], and by layer
        concentration, residual and hardness: what a heat map and a table need, small enough to keep with a score."""
        assert self.position_nmse is not None
        length = len(self.position_nmse[0])
        edges = sorted({n for k in range(12) for n in (2**k, 3 * 2 ** (k - 1) if k else 1) if n <= length} | {length + 1})
        bins = list(itertools.pairwise(edges))
        rows = [[_rounded(sum(row[a - 1 : b - 1]) / (b - a)) for a, b in bins] for row in self.position_nmse]
        by_layer = {name: [_rounded(x) for x in getattr(self, name)] for name in ("concentration", "residual", "hardness")}
        return {"layers": self.layers, "positions": bins, "nmse": rows, **by_layer}

    def save(self, folder: Path) -> None:
        """layers.csv, positions.csv, bins.csv and diagnostics.json."""
        folder.mkdir(parents=True, exist_ok=True)
        error: list[Any] = list(self.nmse or [None] * len(self.layers))  # type: ignore[list-item]
        _write(
            folder / "layers.csv",
            ("layer", "concentration", "residual", "hardness", "nmse"),
            zip(self.layers, self.concentration, self.residual, self.hardness, error),
        )
        rows = (
            (layer, t, self.position_concentration[i][t], self.position_residual[i][t],
             self.position_nmse[i][t] if self.position_nmse else None)
            for i, layer in enumerate(self.layers) for t in range(len(self.position_concentration[i]))
        )  # fmt: skip
        _write(folder / "positions.csv", ("layer", "position", "concentration", "residual", "nmse"), rows)
        flat = ((kind, *row.values()) for kind, found in self.bins.items() for row in found)
        _write(folder / "bins.csv", ("by", "centre", "nmse", "tokens"), flat)
        (folder / "diagnostics.json").write_text(json.dumps(vars(self)))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _write(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def diagnose(model: PreTrainedModel, windows: Iterable[Tensor]) -> Diagnostics:
    """Run the base model over token windows [T] of one length and measure every layer (a linearized one: its own too).

    Keys are those of the frozen model after rotation. nMSE of a layer: mean (y_full − y_lin)² over Var(y_full), both
    over tokens and channels, y after o_proj. Raises ValueError for windows of several lengths or beyond 2048 tokens.
    """
    converted = hasattr(model, "recipe")
    modules = {i: m for i, m in enumerate(attention_modules(model)) if not converted or isinstance(m, LinearizedAttention)}
    sums: dict[int, _Layer] = {}
    tokens = 0
    with torch.inference_mode():
        for window in windows:
            if window.ndim != 1 or not 2 <= len(window) <= MOST_TOKENS:
                raise ValueError(f"a window is [T] with 2 ≤ T ≤ {MOST_TOKENS}, not {list(window.shape)}")
            sums = sums or {i: _Layer.empty(len(window)) for i in modules}
            if len(window) != len(sums[min(sums)].squared):
                raise ValueError("the windows must be of one length")
            tokens += len(window)
            with _watching(modules, sums, converted):
                _run_base(model, window[None].to(model.device), converted)
    if not tokens:
        raise ValueError("no windows to measure on")
    return _finish(sums, tokens, converted)


def _run_base(model: PreTrainedModel, tokens: Tensor, converted: bool) -> None:
    """The frozen model's forward pass without its output head."""
    if converted:
        with base_attention(model):
            model(input_ids=tokens, paths="base", logits_to_keep=1)
    else:
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)


@contextmanager
def _watching(modules: dict[int, Any], sums: dict[int, _Layer], converted: bool) -> Iterator[None]:
    """Inside, every attention layer's pass is added to its sums."""

    def hook(layer: _Layer) -> Any:
        def add(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            positions = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
            keys = unit_keys(LinearizedAttention.project(module, hidden, positions)[1])
            concentration, residual = (x.mean(1)[0].double().cpu() for x in concentration_and_residual(keys))
            layer.concentration += concentration
            layer.residual += residual
            if converted:
                _add_error(layer, output[0].float(), _linear(module, hidden, positions).float(), concentration, residual)
            else:
                layer.entries += hidden.shape[1]

        return add

    handles = [m.register_forward_hook(hook(sums[i]), with_kwargs=True) for i, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _linear(module: Any, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """What the linearized layer makes of the base's inputs: [1, T, C] after o_proj."""
    layout = make_layout(hidden.shape[0], hidden.shape[1], hidden.device)
    set_lora(module, True)
    try:
        return module.o_proj(module.mix(hidden, positions, layout).flatten(-2))
    finally:
        set_lora(module, False)


def _add_error(layer: _Layer, full: Tensor, linear: Tensor, concentration: Tensor, residual: Tensor) -> None:
    """full, linear: [1, T, C]; concentration, residual: [T], what the errors are binned by."""
    error = (full - linear).square()[0]
    layer.squared += error.sum(-1).double().cpu()
    layer.total += float(full.double().sum())
    layer.total_squared += float(full.double().square().sum())
    layer.entries += full.numel()
    mean = error.mean(-1).double().cpu()
    for bins, value, low in ((layer.by_concentration, concentration, -1.0), (layer.by_residual, residual, 0.0)):
        index = ((value - low) / (1 - low) * NUM_BINS).long().clamp(0, NUM_BINS - 1)
        bins[0].index_add_(0, index, mean)
        bins[1].index_add_(0, index, torch.ones_like(mean))


def _finish(sums: dict[int, _Layer], tokens: int, converted: bool) -> Diagnostics:
    length = len(next(iter(sums.values())).squared)
    sequences = tokens // length
    layers = list(sums.values())
    concentration = [layer.concentration / sequences for layer in layers]
    residual = [layer.residual / sequences for layer in layers]
    c, r = ([float(x.mean()) for x in rows] for rows in (concentration, residual))
    hardness = [(a + b) / 2 for a, b in zip(_ranks([-x for x in c]), _ranks(r))]
    position_nmse = nmse = None
    if converted:
        channels = layers[0].entries // tokens
        position_nmse = [(s.squared / (sequences * channels) / s.variance).tolist() for s in layers]
        nmse = [float(s.squared.sum()) / s.entries / s.variance for s in layers]
    return Diagnostics(
        layers=list(sums), concentration=c, residual=r, hardness=hardness, nmse=nmse,
        position_concentration=[x.tolist() for x in concentration], position_residual=[x.tolist() for x in residual],
        position_nmse=position_nmse, bins=_bins(layers) if converted else {}, tokens=tokens,
    )  # fmt: skip


def _ranks(values: list[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    return [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]


def _bins(layers: list[_Layer]) -> dict[str, list[dict[str, float]]]:
    """nMSE over all layers by the concentration and the residual of the token; each layer's error over its variance."""
    found = {}
    for kind, low in (("concentration", -1.0), ("residual", 0.0)):
        sums = [getattr(layer, f"by_{kind}") for layer in layers]
        error = torch.stack([s[0] / layer.variance for s, layer in zip(sums, layers)]).sum(0)
        count = torch.stack([s[1] for s in sums]).sum(0)
        width = (1 - low) / NUM_BINS
        found[kind] = [
            {"centre": low + (i + 0.5) * width, "nmse": float(error[i] / count[i]), "tokens": float(count[i])}
            for i in range(NUM_BINS) if count[i]
        ]  # fmt: skip
    return found


def hardest_layers(model: PreTrainedModel, windows: Iterable[Tensor], share: float, by: str = "keys") -> str:
    """What ``hardest:SHARE`` stands for on this model and text, as ``Recipe.softmax_layers`` takes it: ``list:3,7,…``."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    return "list:" + ",".join(map(str, diagnose(model, windows).hardest(share, by)))


def resolve_hardest(recipe: Recipe, model: PreTrainedModel, data: Callable[[], TokenData]) -> Recipe:
    """The recipe with ``hardest:SHARE`` as a list of layers, measured on held-out text of ``data``; others as they are.

    model: the base. The text is asked for only when it is needed. Raises ValueError when it has too few tokens.
    """
    kind, _, share = recipe.softmax_layers.partition(":")
    if kind != "hardest":
        return recipe
    length = min(HARDNESS_LENGTH, model.config.max_position_embeddings)
    windows = torch.from_numpy(data().heldout(HARDNESS_TOKENS, length))
    return replace(recipe, softmax_layers=hardest_layers(model, windows, float(share)))


def _running_mean(curve: list[float]) -> list[float]:
    """Of the last SMOOTH values at each place, fewer at the start."""
    total = list(itertools.accumulate(curve, initial=0.0))
    return [(total[t + 1] - total[max(0, t + 1 - SMOOTH)]) / min(t + 1, SMOOTH) for t in range(len(curve))]


def draw(found: Diagnostics, folder: Path) -> list[Path]:
    """The paper's figures 2b (error by token), 2c (error by concentration and residual) and 3 (by layer), as PNG."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    made = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / name, dpi=150)
        made.append(folder / name)

    figure = Figure(figsize=(6, 3.5))
    axis = figure.subplots()
    curves = found.position_nmse or found.position_residual
    smooth = [_running_mean(curve) for curve in curves]
    for layer, curve in zip(found.layers, smooth):
        axis.plot(curve, color=str(0.85 - 0.5 * layer / (max(found.layers) or 1)), linewidth=0.6)
    axis.plot([sum(values) / len(values) for values in zip(*smooth)], linewidth=2, label="mean over layers")
    name = "nMSE" if found.position_nmse else "projection residual"
    axis.set(xlabel="token", ylabel=f"{name}, mean of {SMOOTH} tokens", title="By token, a line a layer (darker: deeper)")
    axis.legend(frameon=False)
    save(figure, "by_token.png")
    if found.bins:
        figure = Figure(figsize=(8, 3.5))
        for axis, (kind, rows) in zip(figure.subplots(1, 2), found.bins.items()):
            axis.plot([row["centre"] for row in rows], [row["nmse"] for row in rows], marker="o", markersize=3)
            axis.set(xlabel=KIND_NAMES[kind], ylabel="nMSE", yscale="log")
            axis.set_ylim(bottom=max(FLOOR, min(row["nmse"] for row in rows) / 2))  # tokens with no others than exact ones: 0
        save(figure, "by_keys.png")
    figure = Figure(figsize=(8, 3.5))
    for axis, (name, values) in zip(
        figure.subplots(1, 3), (("concentration", found.concentration), ("residual", found.residual), ("nMSE", found.nmse))
    ):
        if values is not None:
            axis.bar(found.layers, values)
        axis.set(xlabel="layer", title=name if values is not None else f"{name}: needs a linearized model")
    save(figure, "by_layer.png")
    return made
