"""What a module owns itself, not the modules below it."""

from __future__ import annotations

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
