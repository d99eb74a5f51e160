"""A worker whose card has room for one sequence. Imported by a test when Ray may be: flows.workers imports it."""

from __future__ import annotations

from typing import Any

from flows import workers
from flows.overhead import Noop, NoopWorker


class OutOfMemory(Noop):
    """Stages that do nothing, with a card that is full."""

    def train(self, cell: Any, folder: Any, bench: Any, placement: Any, **more: Any) -> Any:
        import torch

        if placement.micro_batch > 1:
            raise torch.OutOfMemoryError(f"CUDA out of memory with {placement.micro_batch} sequences")
        return super().train(cell, folder, bench, placement, **more)


class SmallCard(NoopWorker):
    """The worker."""

    def __init__(self, store: Any, placement: Any):
        super().__init__(store, placement)
        workers.stages = OutOfMemory()
