"""Speed of a model as it stands, for tables: prefill of a prompt and tokens decoded after it (the paper's figure 2a).

The same measurements as ``golinear bench prefill`` and ``bench decode``, at one length; batch 8, random tokens. Speed
does not depend on what was trained, so a cell of few tokens tells it as well as one of many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from linear_core.bench import decode, prefill
from linear_core.evaluate.run import Measured
from linear_core.evaluate.scores import TaskSpec
from linear_core.models import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEQUENCES = 8


class OutOfRoom(Exception):
    """The prompt does not fit: the reason for a missing score."""


def score_latency(model: PreTrainedModel, task: TaskSpec) -> list[Measured]:
    """Decoded tokens/s of 8 sequences from a cache at ``task.length``, prefill tokens/s, and MiB of cache a sequence.

    Raises OutOfRoom when memory does not suffice.
    """
    assert task.length is not None
    length, device = task.length, str(model.device)
    linear = hasattr(model, "recipe")
    generator = torch.Generator().manual_seed(task.seed)
    tokens = torch.randint(0, model.config.vocab_size, (SEQUENCES, length), generator=generator).to(device)
    run = prefill.linear_prefill if linear else prefill.full_prefill
    row = prefill.measure("", model, run, tokens, 3 if device.startswith("cuda") else 1)
    if row["prefill_ms"] is None:
        raise OutOfRoom(f"{SEQUENCES} prompts of {length:,} tokens do not fit into the memory of {device}")
    if linear and model._has_softmax_layers:
        per_second = SEQUENCES * decode.NEW_TOKENS / row["16_tokens_ms"] * 1000
        how = "16 plain forward calls: layers that keep softmax grow"
    else:
        step, _ = (
            decode.linear_step(model, SEQUENCES, length)
            if linear
            else decode.full_step(model, shape_of(model.config), SEQUENCES, length)
        )
        per_second = SEQUENCES / decode.time_steps(step, device)
        how = "median of 16 steps"
    details = {**{k: v for k, v in row.items() if k != "what"}, "device": device, "how": how}
    values = {
        "tokens_per_s": per_second,
        "prefill_tokens_per_s": row["prefill_tokens_per_second"],
        "cache_mib": row["cache_mib"] / SEQUENCES,
    }
    return [Measured(name, value, None, SEQUENCES, (), details) for name, value in values.items()]
