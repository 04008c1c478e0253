"""Forward and backward of a step as one CUDA graph, so that the host has next to nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtplan._errors import ApplyError
from dtplan.planner.apply import applied
from dtplan.planner.dropout import drops

_WARMUP = 3
"""Steps before recording: kernels are compiled and chosen, communicators made, and FP8 gets a history."""


class GraphedStep:
    """``loss = step(input_ids=..., labels=...)`` runs forward and backward of a parallelized model as one CUDA graph.

    The first call trains nothing: it runs three steps to warm up, records a fourth, and then plays it. Gradients are in
    ``.grad`` as usual, anew each time, or added to with ``accumulate=True``. Weights may change in place between calls
    (optimizers do); shapes, dtypes and the arguments' names may not, so pad batches to one length. Memory for a step's
    activations stays taken.

    Raises:
        ApplyError: the model is not parallelized, not on GPUs, drops values at random or has FSDP2 around it; a batch
            unlike the first; something in the model cannot be recorded (a value that the host must know, say).
    """

    def __init__(self, model: nn.Module) -> None:
        bound = applied(model).bound
        why = None
        if bound.degrees["shard"] * bound.degrees["replicate"] > 1:
            why = "FSDP2 is around the model, whose own streams are not recorded"
        elif model.training and drops(model):
            why = "the model drops values at random, and a graph would drop the same ones in every step"
        elif any(parameter.device.type != "cuda" for parameter in model.parameters()):
            why = "the model is not on GPUs"
        if why is not None:
            raise ApplyError(f"GraphedStep: {why}; call model(...) and loss.backward() instead")
        self._step = Recorded(model, lambda **batch: model(**batch).loss)

    def __call__(self, *, accumulate: bool = False, **batch: Any) -> Tensor:
        """The loss; gradients are set, or added to."""
        return self._step(batch, accumulate=accumulate)


class Recorded:
    """A loss function's forward and backward, recorded at the first call and played from then on."""

    def __init__(self, model: nn.Module, loss_of: Callable[..., Tensor]) -> None:
        self.loss_of = loss_of
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.inputs: dict[str, Any] = {}
        self.grads: list[Tensor | None] = []
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._stream = torch.cuda.Stream()

    def __call__(self, batch: Mapping[str, Any], *, accumulate: bool) -> Tensor:
        """Copy the batch to where the graph reads it, and play the graph."""
        mine = bool(self.grads) and all(p.grad is grad for p, grad in zip(self.parameters, self.grads, strict=True))
        accumulate = accumulate and any(parameter.grad is not None for parameter in self.parameters)
        if accumulate and not mine:
            raise ApplyError("GraphedStep: accumulate=True adds to gradients of its own steps, and .grad holds others")
        if not self._graphs:
            self.inputs = {name: v.clone() if isinstance(v, Tensor) else v for name, v in batch.items()}
            self._warm_up()
            self._graphs[False] = self._recorded()
            self.grads = [parameter.grad for parameter in self.parameters]
        self._refuse_other(batch)
        if accumulate and True not in self._graphs:
            self._graphs[True] = self._recorded()
        for name, value in batch.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)
        graph, loss = self._graphs[accumulate]
        graph.replay()
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad
        return loss.clone()

    def _warm_up(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._masks():
            for _ in range(_WARMUP):
                self._forget()
                self.loss_of(**self.inputs).backward()
            self._forget()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _masks(self) -> AbstractContextManager[None]:
        return _masks_as_recorded(packed="position_ids" in self.inputs)

    def _forget(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _recorded(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Recording computes nothing. The graphs share their memory: only one runs at a time."""
        graph = torch.cuda.CUDAGraph()
        pool = self._graphs[False][0].pool() if self._graphs else None
        try:
            with (
                self._masks(),
                # other threads may use the GPU meanwhile: autograd's runs the backward
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                loss = self.loss_of(**self.inputs)
                loss.backward()
        except RuntimeError as error:
            raise ApplyError(
                f"GraphedStep: this model's step cannot be recorded ({str(error).splitlines()[0]}); "
                "call model(...) and loss.backward() instead"
            ) from error
        return graph, loss.detach()

    def _refuse_other(self, batch: Mapping[str, Any]) -> None:
        wanted, given = _shapes(self.inputs), _shapes(batch)
        if wanted != given:
            raise ApplyError(
                f"GraphedStep: recorded for {_told(wanted)}, called with {_told(given)}: pad to one shape, or make one "
                "GraphedStep for each"
            )


def _shapes(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {n: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for n, v in sorted(batch.items())}


def _told(shapes: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} {list(v[0])} {v[1]}" if isinstance(v, tuple) else f"{n}={v!r}" for n, v in shapes.items())


@contextmanager
def _masks_as_recorded(*, packed: bool) -> Iterator[None]:
    """Let transformers decide about masks as it must while recording, by no value that the host would wait for.

    Warm-up and recording then run the same code. Tried on 5.17 and 5.24: without this, 5.17 takes the lack of a padding
    mask for a reason to make one, and both take every batch for packed, which costs the fast attention kernels.
    ``packed``: the batch says its positions, so it may hold several sequences in a row.
    """
    from transformers import masking_utils

    masks: Any = masking_utils
    before = masks.is_tracing, masks.find_packed_sequence_indices
    masks.is_tracing = lambda tensor=None: tensor is not None
    if not packed:
        masks.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masks.is_tracing, masks.find_packed_sequence_indices = before
