"""What a module owns itself, not the modules below it, and what it computes with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Its buffers by name."""
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return parameters_of(module) | buffers_of(module)


def computes_linear(module: nn.Module) -> bool:
    """Whether a Linear, or a class made from it, computes what a Linear does; told by running it."""
    if type(module) is nn.Linear or not isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    x = torch.randn(3, 5, module.weight.shape[1], dtype=module.weight.dtype)
    try:
        with torch.no_grad():
            return bool(torch.allclose(module(x), F.linear(x, module.weight, module.bias)))
    except (RuntimeError, TypeError, ValueError):
        return False
