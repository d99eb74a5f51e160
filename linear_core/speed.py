"""Training steps at the speed of the card: fused elementwise work, and small models without launch overhead.

``compiled`` compiles each decoder layer on its own (one compilation serves all layers of a model). ``FastStep`` records
a whole step in a CUDA graph once its shapes have been seen, and replays it: a 135M model spends nine tenths of an eager
step on launching kernels. Neither changes what a step computes but for rounding; on the CPU both leave things alone.
``checkpoint_activations`` keeps only the inputs of the layers for the backward pass, which runs each layer again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from linear_core.objectives import Objective, Sequences
from linear_core.ranks import ALONE, Ranks
from linear_core.step import Stopped, Trainee, train_step

logger = logging.getLogger(__name__)

EAGER_STEPS = 3  # before a capture: kernels are compiled and chosen, memory is allocated
RECOMPILE_LIMIT = 64  # a process trains many recipes; dynamo's own limit of 8 would fall back to eager silently


class LayerCall:
    """Stands in for a decoder layer's ``forward``: compiled or not, its activations kept or made again.

    The checkpoint lies around the compiled code, which breaks at the kernels and could not be compiled with a checkpoint
    in it. Hooks of the module, those of sharded weights too, lie around both.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._plain = layer, layer.forward
        self._compiled: Callable[..., Any] | None = None
        self._recomputes = False

    @classmethod
    def of(cls, layer: Any) -> LayerCall:
        """The layer's own, installed when it has none."""
        if not isinstance(layer.forward, cls):
            layer.forward = cls(layer)
        return layer.forward

    def set(self, *, backend: str | None = None, recompute: bool | None = None) -> None:
        """backend: of torch.compile, "" for the plain code again. With nothing left to do the layer is as it was."""
        if backend is not None:
            self._compiled = torch.compile(self._plain, dynamic=False, backend=backend) if backend else None
        if recompute is not None:
            self._recomputes = recompute
        if self._compiled is None and not self._recomputes:
            del self._layer.forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        run = self._compiled or self._plain
        if not (self._recomputes and torch.is_grad_enabled()):
            return run(*arguments, **named)
        # there is no dropout whose random numbers would have to be drawn again; reading the generator's state would
        # keep a step from being recorded in a CUDA graph
        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def checkpoint_activations(model: Any, share: float = 1.0) -> None:
    """Of so large a share of the decoder layers, spread evenly, of a plain or linearized model; 0 for none.

    Costs their forward pass once more a step and changes no number. Raises ValueError for a share outside 0 … 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"checkpoint_activations is the share of the layers to recompute, 0 … 1, not {share!r}")
    layers = model.model.layers
    number = math.ceil(share * len(layers))
    for i, layer in enumerate(layers):
        LayerCall.of(layer).set(recompute=(i + 1) * number // len(layers) > i * number // len(layers))


@contextmanager
def compiled(models: Sequence[Any], backend: str = "inductor") -> Iterator[None]:
    """Within it the decoder layers of these models run compiled, for shapes that stay the same (training on CUDA).

    The first layer stays eager: its input wants no gradient, which would be a second compilation for one layer. On
    CUDA float32 products, those of the new parameters (gates, LoRA), are made by the tensor cores (TF32) meanwhile.
    backend: of torch.compile; with another than inductor the layers are compiled on a CPU too.
    """
    on_cpu_too = backend != "inductor"
    chosen = [model for model in models if on_cpu_too or model.device.type == "cuda"]
    calls = [LayerCall.of(layer) for model in chosen for layer in model.model.layers[1:]]
    limits: dict[str, Any] = {
        "recompile_limit": RECOMPILE_LIMIT,
        "accumulated_recompile_limit": 16 * RECOMPILE_LIMIT,
        "suppress_errors": True,  # what cannot be compiled runs eagerly, with a warning
    }
    precision = torch.get_float32_matmul_precision()
    with torch._dynamo.config.patch(limits):
        for call in calls:
            call.set(backend=backend)
        if any(model.device.type == "cuda" for model in chosen):
            torch.set_float32_matmul_precision("high")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for call in calls:
                call.set(backend="")


@contextmanager
def plain_causal() -> Iterator[None]:
    """Within it transformers takes rows for single unpadded sequences, as those of a recorded step are. It would look at
    positions and masks to find out, cannot do so during a capture, and would then make a mask of T × T."""
    known = {"find_packed_sequence_indices": lambda position_ids: None, "is_tracing": lambda tensor=None: False}
    kept = {name: getattr(masking_utils, name) for name in known}
    vars(masking_utils).update(known)
    try:
        yield
    finally:
        vars(masking_utils).update(kept)


class Recorded:
    """Work on a step's sequences, recorded in a CUDA graph once it has run a few times; for sequences of one shape."""

    def __init__(self, work: Callable[[Sequences], Tensor]) -> None:
        self._work = plain_causal()(work)
        self._seen = 0
        self._refused = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: Sequences) -> Tensor:
        """``work(batch)``. The sequences are copied to where the graph reads them, the result to where it stays."""
        if self._graph is None and self._seen < EAGER_STEPS:
            self._seen += 1
            return self._beside(batch)
        if self._graph is None and not self._refused:
            self._record(batch)
        if self._graph is None:
            return self._beside(batch)
        self._batch.input_ids.copy_(batch.input_ids)
        self._batch.labels.copy_(batch.labels)
        self._graph.replay()
        return self._result.clone()

    def _beside(self, batch: Sequences) -> Tensor:
        """Run on a stream of its own, as a capture wants of what came before it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._work(batch)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _record(self, batch: Sequences) -> None:
        torch.cuda.synchronize()
        self._batch = dataclasses.replace(batch, input_ids=batch.input_ids.clone(), labels=batch.labels.clone())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._result = self._work(self._batch)
        except torch.OutOfMemoryError:
            raise  # the caller has a smaller plan
        except RuntimeError as error:
            self._refused = True
            logger.warning(
                "a step of %s tokens could not be recorded and stays eager: %s", tuple(batch.input_ids.shape), error
            )
            return
        self._graph = graph
        logger.info("recorded a step of %s tokens in a CUDA graph", tuple(batch.input_ids.shape))


class FastStep:
    """``train_step`` with a CUDA graph behind it. A step of other shapes, cells or memory plan is recorded anew.

    Steps that several ranks make together are not recorded.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._key: tuple[Any, ...] | None = None
        self._recorded: Recorded | None = None

    def reset(self) -> None:
        """Forget the recorded step and free its memory."""
        self._key = self._recorded = None

    def __call__(
        self,
        trainees: Sequence[Trainee],
        objective: Objective,
        batch: Sequences,
        micro_batch: int,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Tensor:
        """As ``linear_core.step.train_step``. ``should_stop`` is asked once, before a recorded step: it is one launch."""
        if not batch.input_ids.is_cuda or batch.document_ids is not None or self.ranks.size > 1:
            return train_step(trainees, objective, batch, micro_batch, should_stop, self.ranks)
        if should_stop():
            raise Stopped
        key = (batch.input_ids.shape, batch.num_targets, micro_batch, id(objective), tuple(map(id, trainees)))
        if key != self._key or self._recorded is None:
            self.reset()
            self._key = key
            self._recorded = Recorded(lambda sequences: train_step(trainees, objective, sequences, micro_batch))
        return self._recorded(batch)
