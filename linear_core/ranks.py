"""Several processes that train and measure one cell together: the ranks of a torch.distributed group.

    with joined(rank, size, "10.0.0.1:29500", device="cuda"):
        train(model, …)                      each rank calls the same with its own model

Every rank draws its share of the same batches, gradients and losses are summed, and all make the same update; a model
whose frozen weights do not fit on one device is spread over the ranks by ``shard``. Results are those of one process
with the same batch size, but for rounding. What only one may do (files, progress) rank 0 does. A rank that ends without
a word leaves the others waiting: whoever started them ends them (``flows.slots``, torchrun).
"""

from __future__ import annotations

import datetime
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from linear_core import models
from linear_core.models import BaseModel

T = TypeVar("T")
ON_RANK = "on rank"
PATIENCE = datetime.timedelta(minutes=20)  # a rank may compile kernels, or write a checkpoint, while the others wait


@dataclass(frozen=True)
class Ranks:
    """This process among ``size``; alone unless a group was joined. Its methods but ``block`` are collective."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def rows(self) -> slice:
        """This rank's part of a batch: every ``size``-th row."""
        return slice(self.rank, None, self.size)

    def block(self, number: int) -> slice:
        """This rank's part of ``number`` things in a row, as even as can be."""
        return slice(number * self.rank // self.size, number * (self.rank + 1) // self.size)

    def add(self, tensors: Sequence[Tensor]) -> None:
        """The sum over all ranks in place of each tensor, in one message."""
        if self.size > 1 and tensors:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
                tensor.copy_(total.view_as(tensor))

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values in place of each tensor."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def any(self, flag: bool) -> bool:
        """Whether it holds on one of the ranks. No rank waits for its GPU."""
        if self.size == 1:
            return flag
        told = torch.tensor(float(flag))
        dist.all_reduce(told)
        return bool(told)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """``work()`` of every rank, by rank; if it fails on one, its exception on all of them."""
        if self.size == 1:
            return [work()]
        done, error = _attempt(work)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (done, error))
        for rank, (_, failed) in enumerate(found):
            if failed is not None:
                failed.add_note(f"{ON_RANK} {rank} of {self.size}")
                raise failed
        return [result for result, _ in found]

    def on_first(self, work: Callable[[], T]) -> T:
        """``work()`` of rank 0, run there alone: its result, or its exception, on every rank."""
        if self.size == 1:
            return work()
        told: list[Any] = [_attempt(work) if self.leads else None]
        dist.broadcast_object_list(told, 0)
        done, error = told[0]
        if error is not None:
            raise error
        return done


ALONE = Ranks()


def current() -> Ranks:
    """The ranks of the group that this process has joined; ``ALONE`` without one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


def is_shared(error: BaseException) -> bool:
    """Whether ``gather`` raised it: then every rank has it."""
    return any(note.startswith(ON_RANK) for note in getattr(error, "__notes__", ()))


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again on every rank
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an exception's own pickling may do anything
            return None, RuntimeError(f"{type(error).__name__}: {error}")
        return None, error


@contextmanager
def joined(rank: int, size: int, address: str, device: str) -> Iterator[Ranks]:
    """Within it this process is a rank: gloo on a CPU, NCCL for tensors on CUDA. address: host:port of rank 0."""
    join(rank, size, address, device)
    try:
        yield current()
    finally:
        dist.destroy_process_group()


def join(rank: int, size: int, address: str, device: str) -> None:
    """As ``joined``, until the process ends. Waits for all ranks to come."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device if ":" in device else torch.cuda.current_device())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"tcp://{address}", rank=rank, world_size=size,
        timeout=PATIENCE,
    )  # fmt: skip


@contextmanager
def started_by_torchrun(device: str) -> Iterator[tuple[Ranks, str]]:
    """Within it this process is the rank that ``torchrun`` made it; alone without torchrun. Yields its device too."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield current(), device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), address, device) as ranks:
        yield ranks, device


def check_batch(batch_size: int, size: int) -> None:
    """Raises ValueError when a batch cannot be shared evenly."""
    if batch_size % size:
        raise ValueError(
            f"batch_size {batch_size} cannot be shared by {size} ranks (GPUs of a cell); allowed: a multiple of {size}"
        )


def load(base: BaseModel | str, *, device: str, sharded: bool, backbone: str = "full") -> Any:
    """As ``models.load``, every rank the whole model on its device, or sharded over them (through the host's memory).

    Raises ValueError for sharded 8-bit weights.
    """
    if not sharded:
        return models.load(base, device=device, backbone=backbone)
    if backbone != "full":
        raise ValueError(f"backbone {backbone} cannot be spread over GPUs; allowed: backbone full, or a card that holds it")
    model = models.load(base, dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32)
    shard(model, device)
    return model


def shard(model: Any, device: str) -> None:
    """Spread the frozen weights of the decoder layers over the ranks (FSDP2), in place, on ``device``.

    model: unconverted, on the CPU or on the device; a layer at a time is whole on the device, now and in every pass.
    Embedding, head and norms stay whole on every rank, and so do the new parameters that ``convert`` adds afterwards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    layers = model.model.layers
    spread = {parameter for layer in layers for parameter in layer.parameters()}
    whole = {parameter for parameter in model.parameters() if parameter not in spread}
    for tensor in (*whole, *model.buffers()):
        tensor.data = tensor.data.to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def is_sharded(model: Any) -> bool:
    """Whether ``shard`` spread its weights: then every rank must make the same passes."""
    from torch.distributed.tensor import DTensor

    return current().size > 1 and isinstance(next(model.model.layers[0].parameters()), DTensor)


def sharing(model: Any) -> Ranks:
    """The ranks that may share what is to be measured: all, but of a sharded model each does all of it, in step."""
    return ALONE if is_sharded(model) else current()
