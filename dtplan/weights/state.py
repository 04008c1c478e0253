"""The tensors of a model that a checkpoint holds: parameters and persistent buffers, each once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["StateTensor", "current_device", "mesh_device", "original_name", "state_tensors"]

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Path segments that torch.compile and activation checkpointing put into names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One parameter or persistent buffer and every name that it has; tied weights have more than one."""

    names: tuple[str, ...]
    tensor: Tensor


def original_name(name: str) -> str:
    """``name`` as it was before torch.compile or activation checkpointing wrapped a module."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def state_tensors(model: nn.Module) -> list[StateTensor]:
    """The model's distinct parameters and persistent buffers, in the order of ``state_dict``.

    Asking ``state_dict`` also makes FSDP2 put its sharded parameters back, should a forward have left full
    ones.
    """
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            found.setdefault(id(value), (value, []))[1].append(original_name(name))
    return [StateTensor(names=tuple(names), tensor=tensor) for tensor, names in found.values()]


def mesh_device(model: nn.Module) -> torch.device | None:
    """This rank's device of the mesh that the parameters are on; None when nothing is sharded."""
    for param in model.parameters():
        if isinstance(param, DTensor):
            return current_device(param.device_mesh.device_type)
    return None


def current_device(kind: str) -> torch.device:
    """The device of type ``kind`` that this rank works on."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
