"""AdamW on the new parameters, its schedule and its clipping (recipe section 5), without a host synchronisation in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from linear_core.settings import TrainSettings

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(step: int, settings: TrainSettings, peak: float) -> float:
    """Rate of optimiser step ``step`` (from 0): linear to ``peak`` over the warm-up, then a cosine to its final share.

    The first step has peak / warmup_steps, step ``warmup_steps`` the peak. A run shorter than its warm-up ends in it.
    """
    warmup, total, floor = settings.warmup_steps, settings.num_steps, settings.final_learning_rate
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class NewParameterOptimizer:
    """AdamW over one cell's new parameters. All state is made at once, on the device, so that a step allocates none.

    parameters: name → float32 parameter. The learning rate is a tensor, and an update is left out on the device when
    ``failed`` is 1: once a loss or gradient was not finite, no later update changes a parameter either.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainSettings, peak: float) -> None:
        if not_float := [name for name, p in parameters.items() if p.dtype != torch.float32]:
            raise ValueError(f"new parameters must be float32; {not_float[0]} is {parameters[not_float[0]].dtype}")
        self.parameters, self.settings, self.peak = dict(parameters), settings, peak
        device = next(iter(parameters.values())).device
        self.rate = torch.zeros((), device=device)
        self.failed = torch.zeros((), device=device)
        self._adam = torch.optim.AdamW(
            self.parameters.values(), lr=self.rate, betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay, fused=True, capturable=device.type == "cuda",
        )  # fmt: skip
        self._adam.grad_scale, self._adam.found_inf = None, self.failed  # type: ignore[attr-defined]
        for p in self.parameters.values():
            self._adam.state[p] = {
                "step": torch.zeros((), device=device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
            }  # fmt: skip

    def set_rate(self, step: int) -> float:
        """Put the rate of a step in place; returns it."""
        rate = learning_rate(step, self.settings, self.peak)
        self.rate.fill_(rate)
        return rate

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Of every parameter; zeros, put in place, where none came."""
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def update(self, loss: Tensor) -> Tensor:
        """Clip and update, unless the loss or a gradient is not finite now or was before.

        loss: [] of this step. Returns float32 [3]: loss, gradient norm before clipping, 1 when the update was left out.
        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        self.failed.copy_(torch.maximum(self.failed, (~torch.isfinite(loss + norm)).float()))
        torch._foreach_mul_(gradients, (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self._adam.step()
        return torch.stack([loss.float(), norm.float(), self.failed])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: parameters and moments as ``parameter/NAME``, ``exp_avg/NAME``, …"""
        found: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            found[f"parameter/{name}"] = p.detach()
            found.update({f"{kind}/{name}": self._adam.state[p][kind] for kind in MOMENTS})
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put the tensors of ``tensors()`` back, in place. Raises ValueError when names or shapes differ."""
        ours = self.tensors()
        theirs = {name: t for name, t in tensors.items() if not name.startswith("rng/")}
        if wrong := sorted(ours.keys() ^ theirs.keys()) or [n for n in ours if ours[n].shape != theirs[n].shape]:
            raise ValueError(f"the checkpoint is of other parameters: they differ in {wrong[0]}")
        with torch.no_grad():
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])
