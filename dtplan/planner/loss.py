"""Cross entropy and entropy of logits that are cut along the vocabulary, without ever gathering them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtplan._errors import ApplyError
from dtplan.planner.collectives import Group, all_reduce, chunk_sizes, reduce

_ALONE = Group(name="", size=1, rank=0)
"""Holds all columns: its sums are its own, and nothing is sent."""
_NOTHING = -1000.0
"""So far below the largest a logit's power is 0 in any float. That of -inf is as well, but 0 times -inf is nan."""


class Kernels(NamedTuple):
    """What is done to every logit of a rank; see the functions below."""

    largest: Callable[..., Tensor]
    terms: Callable[..., Tensor]
    gradient: Callable[..., Tensor]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    compiled: str | Kernels | None = None,
) -> Tensor:
    """Cross entropy of ``logits`` [..., vocabulary] and ``labels`` [...], equal to that of whole logits.

    Logits that are a DTensor cut along the last dim stay cut: two all-reduces of one or two numbers a token
    (Shoeybi et al. 2019, section 3). Computed in float32 at least. The arguments are torch's: the mean is over labels
    that are not ``ignore_index``, each as often as its ``weight`` [vocabulary] says; where torch divides zero by zero
    it is 0. It is the mean of this rank's rows: over unequal data-parallel parts, divide a sum by the number of all.
    ``compiled``: a backend of ``torch.compile`` for what is done to every logit between the all-reduces, or
    functions that do it; ``"inductor"`` makes no float32 copy of the logits.

    Raises:
        ApplyError: a DTensor that is cut along another dim, or arguments that torch would refuse; also weights
            together with label smoothing.
    """
    _check(logits, labels, weight, reduction, label_smoothing)
    shape, labels = labels.shape, labels.reshape(-1)
    if isinstance(logits, DTensor):
        losses = _of_parts(logits, labels, ignore_index, label_smoothing, compiled=compiled)
    else:
        flat = _at_least_float(logits.reshape(-1, logits.shape[-1]))
        losses = F.cross_entropy(
            flat, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    counted = labels != ignore_index
    if weight is None:
        number = counted.sum().clamp(min=1)
    else:
        weights = weight.to(losses.dtype)[labels.where(counted, 0)].where(counted, 0)
        losses, number = losses * weights, weights.sum()
        number = number.where(number != 0, 1)
    if reduction == "none":
        return losses.view(shape)
    total = losses.sum()
    return total if reduction == "sum" else total / number


def log_probs(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Log probability [...] of every label, 0 for ``ignore_index``; as `cross_entropy`, logits stay cut."""
    return -cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")


def entropy(logits: Tensor) -> Tensor:
    """Entropy [...] of the distributions that ``logits`` [..., vocabulary] give; as in `cross_entropy`, they stay cut.

    Raises:
        ApplyError: a DTensor that is cut along another dim.
    """
    x, group = _columns(logits) if isinstance(logits, DTensor) else (logits, _ALONE)
    x = _at_least_float(x)
    largest = all_reduce(_largest(x.detach()), group, "max").unsqueeze(-1)
    x = (x - largest).clamp(min=_NOTHING)
    powers = x.exp()
    total, weighted = reduce(torch.stack([powers.sum(-1), (powers * x).sum(-1)]), group).unbind()
    return total.log() - weighted / total


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


def _check(logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float) -> None:
    """What would otherwise be wrong in silence, or fail on some ranks."""
    vocabulary = logits.shape[-1]
    if labels.is_floating_point() or labels.numel() * vocabulary != logits.numel():
        raise ApplyError(
            f"labels of shape {list(labels.shape)} and {labels.dtype} for logits of shape {list(logits.shape)}; "
            "cross_entropy takes the number of a class for every row, classes along the last dim"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ApplyError(f"reduction={reduction!r} is none of 'mean', 'sum', 'none'")
    if weight is not None and (label_smoothing or weight.shape != (vocabulary,)):
        raise ApplyError(
            f"weight of shape {list(weight.shape)} with label_smoothing={label_smoothing}; cross_entropy takes one "
            f"number for each of {vocabulary} classes, and no label_smoothing beside it"
        )


def _columns(logits: DTensor) -> tuple[Tensor, Group]:
    """This rank's part of ``logits``, and the ranks that hold the others."""
    if logits.placements != (Shard(logits.dim() - 1),):
        raise ApplyError(f"logits are placed as {logits.placements}; they are needed cut along the last dim")
    return logits.to_local(), Group.of(logits.device_mesh.get_group())


def _of_parts(
    logits: DTensor, labels: Tensor, ignore_index: int, label_smoothing: float, *, compiled: str | Kernels | None
) -> Tensor:
    local, group = _columns(logits)
    flat = local.reshape(len(labels), local.shape[-1])
    kernels = KERNELS if compiled is None else _compiled_kernels(compiled) if isinstance(compiled, str) else compiled
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, labels, group, logits.shape[-1], ignore_index, label_smoothing, kernels
    )
    return losses


def _at_least_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# What is done to every logit; each reads them once and can be compiled to one kernel.


def _largest(x: Tensor) -> Tensor:
    """Of each row; nothing is larger than what a rank without a column has."""
    x = _at_least_float(x)
    return x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))


def _terms(x: Tensor, largest: Tensor, index: Tensor, own: Tensor, smoothing: float) -> Tensor:
    """[2 or 3, rows]: the sum of powers, the target's logit, and with smoothing the sum of logits."""
    if not x.shape[1]:  # fewer columns than ranks
        return largest.new_zeros(3 if smoothing else 2, len(x))
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
    found = (powers - flat).add(hit, alpha=smoothing - 1)  # a product with hit would be float32
    return (found * grad.unsqueeze(-1)).to(x.dtype)


KERNELS = Kernels(_largest, _terms, _gradient)


@functools.cache
def _compiled_kernels(backend: str) -> Kernels:
    return Kernels(*(torch.compile(kernel, backend=backend) for kernel in KERNELS))


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
        largest = all_reduce(kernels.largest(x), group, "max")
        summed = all_reduce(kernels.terms(x, largest, index, own, smoothing), group)
        losses = summed[0].log() - (1 - smoothing) * summed[1]
        if smoothing:
            losses = losses - smoothing * summed[2] / vocabulary
        ctx.save_for_backward(x, largest, summed[0], index, own, counted)
        ctx.kernels, ctx.smoothing, ctx.vocabulary = kernels, smoothing, vocabulary
        known = (labels >= 0) & (labels < vocabulary)  # without its logit the loss of another would look right
        return losses.where(known, float("nan")).where(counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, largest, total, index, own, counted = ctx.saved_tensors
        grad = grads[0].where(counted, 0)
        flat = ctx.smoothing / ctx.vocabulary
        return (ctx.kernels.gradient(x, largest, total, index, own, grad, ctx.smoothing, flat), *(None,) * 6)
