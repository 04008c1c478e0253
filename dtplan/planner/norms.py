"""A norm over a dim that is cut: the mean over all of it, of parts that the ranks hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtplan.planner import collectives as coll
from dtplan.planner.collectives import Group
from dtplan.te.norm import Norm


def norm_over_ranks(module: nn.Module, norm: Norm, group: Group, width: int) -> Callable[[Tensor], Tensor]:
    """What ``module``, known to compute ``norm``, does of the whole last dim, from and to the rank's part of it.

    ``width`` is the number of features on all ranks together; what several ranks hold counts on each, so that the mean
    over all of them is the mean over the dim. Computed in float32 or wider, given back in the input's dtype, as
    transformers' norms do.
    """

    def mean(parts: Tensor) -> Tensor:
        """[..., 1]: every rank reads it, so its gradient is summed as it is itself."""
        return coll.copy(coll.reduce(parts.sum(-1, keepdim=True), group), group) / width

    def forward(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if norm.kind == "LayerNorm":
            wide = wide - mean(wide)
        weight: Tensor = module.weight  # type: ignore[assignment]
        out = wide * torch.rsqrt(mean(wide.square()) + norm.eps) * (weight + 1 if norm.zero_centered else weight)
        if norm.bias:
            out = out + module.bias  # type: ignore[operator]
        return out.to(x.dtype)

    return forward
