"""Which functions of a model with fused layers are worth compiling: those between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dtplan.te.install import Entering


def regions(unit: nn.Module) -> dict[str, Entering]:
    """Names of the modules in ``unit`` that are compiled between fused layers, and their forwards."""
    return {name: module.forward for name, module in unit.named_modules() if isinstance(module.forward, Entering)}


def compile_regions(unit: nn.Module, options: dict[str, Any]) -> bool:
    """Compile what the fused regions of ``unit`` compute between their fused layers; False if there are none.

    Compiling the unit as a whole would break at every fused layer, and cost more than it brings.
    """
    found = regions(unit)
    for region in found.values():
        region.inner = torch.compile(region.inner, **options)
    return bool(found)
