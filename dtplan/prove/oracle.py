"""The oracle: an unsharded model's outputs and gradients in float64, and how far a sharded one is from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dtplan.planner.apply import stored_parameters
from dtplan.planner.loss import causal_lm_loss

BOUND = 1e-12
"""Relative error, per tensor, that rounding in float64 stays under and that a wrong plan does not."""


class _Float64Casts(TorchFunctionMode):
    """Reads every explicit cast to float32 as one to float64.

    Norms, rotary tables, attention and losses of transformers cast to float32, which would end any proof at 1e-8.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(_lifted(arg) for arg in args)
        return func(*args, **{key: _lifted(value) for key, value in (kwargs or {}).items()})


def _lifted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64_casts() -> Iterator[None]:
    """Inside, models in float64 stay in float64; recomputation in backward is not reached (torch's modes are not)."""
    with _Float64Casts():
        yield


@dataclass(frozen=True, slots=True)
class Outcome:
    """Logits, loss and the gradient of every parameter of one forward and backward, all whole tensors."""

    logits: Tensor
    loss: Tensor
    grads: Mapping[str, Tensor]


def outcome(model: nn.Module, batch: Mapping[str, Tensor]) -> Outcome:
    """Run ``model`` on ``batch`` (``input_ids``, ``labels`` [batch, sequence]) in float64, forward and backward.

    A sharded model's tensors are gathered, so the result is global on every rank.
    """
    model.zero_grad()
    with float64_casts():
        logits = logits_of(model, batch)
        loss = causal_lm_loss(logits, batch["labels"])
        loss.backward()
    grads = wholes(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return Outcome(logits=whole(logits).detach(), loss=whole(loss).detach(), grads=grads)


def wholes(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of the shapes of ``model``'s parameters, by the names and in the order of its checkpoints."""
    stored = stored_parameters(model)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in stored:
            found |= stored[name].split(whole(tensor), _tp_rank(tensor))
        else:
            found[name] = whole(tensor)
    return found


def _tp_rank(tensor: Tensor) -> int:
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    return mesh.get_local_rank("tp") if mesh is not None and mesh.ndim > 1 else mesh.get_local_rank() if mesh else 0


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """What ``model`` gives for a batch without its labels: its output, or the output's ``logits``."""
    inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if hasattr(getattr(model, "config", None), "use_cache"):
        inputs["use_cache"] = False
    found = model(**inputs)
    logits: Tensor = found if isinstance(found, Tensor) else found.logits
    return logits


def whole(tensor: Tensor) -> Tensor:
    """The global tensor of a DTensor, a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors(found: Outcome, truth: Outcome) -> dict[str, float]:
    """Relative error of every tensor: largest difference over largest magnitude of the truth.

    A gradient that one side lacks, or of another shape, has an infinite error.
    """
    pairs = {"logits": (found.logits, truth.logits), "loss": (found.loss, truth.loss)}
    distances = {name: relative_error(*pair) for name, pair in pairs.items()}
    for name in sorted(set(found.grads) | set(truth.grads)):
        both = found.grads.get(name), truth.grads.get(name)
        distances[f"grad {name}"] = (
            float("inf") if both[0] is None or both[1] is None else relative_error(both[0], both[1])
        )
    return distances


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Largest difference over the largest magnitude of ``truth``; infinite where shapes differ or one is NaN."""
    if found.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    difference = (found - truth).abs().max().item()
    scale = truth.abs().max().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself
