"""Cross entropy over logits that are cut along the vocabulary, without ever gathering them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtplan._errors import ApplyError
from dtplan.planner.collectives import Group, all_reduce, chunk_sizes


class Kernels(NamedTuple):
    """What is done to every logit of a rank; see the functions below."""

    largest: Callable[..., Tensor]
    terms: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    compiled: str | Kernels | None = None,
) -> Tensor:
    """Cross entropy of ``logits`` [..., vocabulary] and ``labels`` [...], equal to that of whole logits.

    Logits that are a DTensor cut along the last dim stay cut: two all-reduces of one or two numbers a token
    (Shoeybi et al. 2019, section 3). Computed in float32 at least. The mean is over labels that are not
    ``ignore_index``; when there is none it is 0. ``compiled``: a backend of ``torch.compile`` for what is done to every
    logit between the all-reduces, or functions that do it; ``"inductor"`` makes no float32 copy of the logits.

    Raises:
        ApplyError: a DTensor that is cut along another dim.
    """
    labels = labels.reshape(-1)
    if isinstance(logits, DTensor):
        losses = _of_parts(logits, labels, ignore_index, label_smoothing, compiled=compiled)
    else:
        flat = _at_least_float(logits.reshape(-1, logits.shape[-1]))
        losses = F.cross_entropy(
            flat, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum().clamp(min=1)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    compiled: str | Kernels | None = None,
    **_unused: Any,
) -> Tensor:
    """The next-token loss with the signature that transformers calls; ``logits`` may be cut.

    ``num_items_in_batch``: the sum of the losses is divided by it instead of by the number of labels.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index, compiled=compiled)
    summed = cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum", compiled=compiled)
    return summed / num_items_in_batch


def _of_parts(
    logits: DTensor, labels: Tensor, ignore_index: int, label_smoothing: float, *, compiled: str | Kernels | None
) -> Tensor:
    if logits.placements != (Shard(logits.dim() - 1),):
        raise ApplyError(f"logits are placed as {logits.placements}; cross_entropy needs them cut along the last dim")
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    local = logits.to_local()
    flat = local.reshape(-1, local.shape[-1])
    group = Group.of(mesh.get_group())
    kernels = _KERNELS if compiled is None else _compiled_kernels(compiled) if isinstance(compiled, str) else compiled
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, labels, group, vocabulary, ignore_index, label_smoothing, kernels
    )
    return losses


def _at_least_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# What is done to every logit; each reads them once and can be compiled to one kernel.


def _largest(x: Tensor) -> Tensor:
    """Of each row."""
    return _at_least_float(x).amax(-1)


def _terms(x: Tensor, largest: Tensor, index: Tensor, own: Tensor, smoothing: float) -> Tensor:
    """[2 or 3, rows]: the sum of powers, the target's logit, and with smoothing the sum of logits."""
    x = _at_least_float(x) - largest.unsqueeze(-1)
    target = x.gather(1, index.unsqueeze(-1)).squeeze(-1).where(own, 0)
    return torch.stack([x.exp().sum(-1), target] + ([x.sum(-1)] if smoothing else []))


def _gradient(
    x: Tensor, largest: Tensor, total: Tensor, index: Tensor, own: Tensor, grad: Tensor, smoothing: float, flat: float
) -> Tensor:
    """Of the logits, in their dtype: (softmax - target) * grad."""
    powers = (_at_least_float(x) - largest.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    columns = torch.arange(x.shape[1], device=x.device)
    hit = (columns == index.unsqueeze(-1)) & own.unsqueeze(-1)
    found = powers - flat - hit * (1 - smoothing)
    return (found * grad.unsqueeze(-1)).to(x.dtype)


_KERNELS = Kernels(_largest, _terms, _gradient)


@functools.cache
def _compiled_kernels(backend: str) -> Kernels:
    return Kernels(*(torch.compile(kernel, backend=backend) for kernel in _KERNELS))


class _CrossEntropy(torch.autograd.Function):
    """Per-token losses [tokens] of this rank's columns [tokens, own vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        labels: Tensor,
        group: Group,
        vocabulary: int,
        ignore: int,
        smoothing: float,
        kernels: Kernels,
    ) -> Tensor:
        first = sum(chunk_sizes(vocabulary, group.size)[: group.rank])
        counted = labels != ignore
        own = (labels >= first) & (labels < first + x.shape[1]) & counted
        index = (labels - first).where(own, 0)
        columns = x if x.shape[1] else x.new_full((len(x), 1), float("-inf"))  # fewer columns than ranks
        largest = all_reduce(kernels.largest(columns), group, "max")
        summed = all_reduce(kernels.terms(columns, largest, index, own, smoothing), group)
        losses = summed[0].log() - (1 - smoothing) * summed[1]
        if smoothing:
            losses = losses - smoothing * summed[2] / vocabulary
        ctx.save_for_backward(x, largest, summed[0], index, own, counted)
        ctx.kernels, ctx.smoothing, ctx.vocabulary = kernels, smoothing, vocabulary
        return losses.where(counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, largest, total, index, own, counted = ctx.saved_tensors
        grad = grads[0].where(counted, 0)
        flat = ctx.smoothing / ctx.vocabulary
        return (ctx.kernels.gradient(x, largest, total, index, own, grad, ctx.smoothing, flat), *(None,) * 6)
