"""Compile a sharded model where it pays: unit by unit, and the loss over cut logits."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

from dtplan.planner.apply import applied
from dtplan.planner.loss import causal_lm_loss
from dtplan.te.compiled import compile_regions

M = TypeVar("M", bound=nn.Module)


def compile_model(model: M, **options: Any) -> M:
    """Compile each of the plan's units in place, and return ``model``; ``options`` are those of ``torch.compile``.

    All alike units share one graph, so the first step compiles one. A unit with TransformerEngine layers is compiled
    between them. With ``loss_parallel`` the model's own loss is compiled too.

    Raises:
        ApplyError: the model is not parallelized.
    """
    bound = applied(model).bound
    options = {"dynamic": False, **options}
    for name in bound.fsdp_units:
        unit = model.get_submodule(name)
        if not compile_regions(unit, options):
            unit.compile(**options)
    if bound.loss_parallel and hasattr(type(model), "loss_function"):
        model.loss_function = functools.partial(causal_lm_loss, compiled=True)  # type: ignore[assignment]
    return model
