"""Cross entropy over logits that are cut along the vocabulary, without ever gathering them."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtplan._errors import ApplyError
from dtplan.planner.collectives import Group, all_reduce, chunk_sizes


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of ``logits`` [..., vocabulary] and ``labels`` [...], equal to that of whole logits.

    Logits that are a DTensor cut along the last dim stay cut: two all-reduces of one or two numbers a token
    (Shoeybi et al. 2019, section 3). Computed in float32 at least. The mean is over labels that are not
    ``ignore_index``; when there is none it is 0.

    Raises:
        ApplyError: a DTensor that is cut along another dim.
    """
    labels = labels.reshape(-1)
    if isinstance(logits, DTensor):
        losses = _of_parts(logits, labels, ignore_index, label_smoothing)
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
    **_unused: Any,
) -> Tensor:
    """The next-token loss with the signature that transformers calls; ``logits`` may be cut.

    ``num_items_in_batch``: the sum of the losses is divided by it instead of by the number of labels.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(logits, shift_labels, ignore_index=ignore_index)
    return cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


def _of_parts(logits: DTensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    if logits.placements != (Shard(logits.dim() - 1),):
        raise ApplyError(f"logits are placed as {logits.placements}; cross_entropy needs them cut along the last dim")
    mesh, vocabulary = logits.device_mesh, logits.shape[-1]
    local = logits.to_local()
    flat = local.reshape(-1, local.shape[-1])
    group = Group.of(mesh.get_group())
    losses: Tensor = _CrossEntropy.apply(flat, labels, group, vocabulary, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    return losses


def _at_least_float(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _CrossEntropy(torch.autograd.Function):
    """Per-token losses [tokens] of this rank's columns [tokens, own vocabulary]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, labels: Tensor, group: Group, vocabulary: int, ignore: int, smoothing: float
    ) -> Tensor:
        dtype, x = x.dtype, _at_least_float(x)
        first = sum(chunk_sizes(vocabulary, group.size)[: group.rank])
        own = (labels >= first) & (labels < first + x.shape[1]) & (labels != ignore)
        index = (labels - first).where(own, 0)
        largest = x.amax(-1) if x.shape[1] else x.new_full((len(x),), float("-inf"))
        x = x - all_reduce(largest, group, "max").unsqueeze(-1)
        target = x.gather(1, index.unsqueeze(-1)).squeeze(-1).where(own, 0) if x.shape[1] else largest.new_zeros(len(x))
        powers = x.exp()
        terms = [powers.sum(-1), target] + ([x.sum(-1)] if smoothing else [])
        summed = all_reduce(torch.stack(terms), group)
        counted = labels != ignore
        losses = summed[0].log() - (1 - smoothing) * summed[1]
        if smoothing:
            losses = losses - smoothing * summed[2] / vocabulary
        ctx.save_for_backward(powers.div_(summed[0].unsqueeze(-1)), index, own, counted)
        ctx.dtype, ctx.smoothing, ctx.vocabulary = dtype, smoothing, vocabulary
        return losses.where(counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probability, index, own, counted = ctx.saved_tensors
        grad = probability - ctx.smoothing / ctx.vocabulary if ctx.smoothing else probability.clone()
        if grad.shape[1]:
            hit = own.to(grad.dtype).mul(ctx.smoothing - 1).unsqueeze(-1)
            grad.scatter_add_(1, index.unsqueeze(-1), hit)
        grad *= grads[0].where(counted, 0).unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None, None, None
