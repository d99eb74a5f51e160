"""Independent work of several cells on a GPU at once: each on a CUDA stream of its own, also inside a recorded step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def side_by_side(works: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results of ``works``, in their order; on CUDA they may run at the same time, elsewhere one after another.

    One small model's kernels do not fill a card: those of another run between them. Each work follows what the caller's
    stream holds, which in turn waits for all of them. What they share they may only read.
    """
    if device.type != "cuda" or len(works) < 2:
        return [work() for work in works]
    caller = torch.cuda.current_stream(device)
    streams = [_stream(device, i) for i in range(len(works))]
    results = []
    for work, stream in zip(works, streams):
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            results.append(work())
    for stream in streams:
        caller.wait_stream(stream)
    return results


@cache
def _stream(device: torch.device, _index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
