"""The tensors of a checkpoint of a model: its parameters and persistent buffers, each once, fused ones taken apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtplan.planner.stored import Stored
from dtplan.weights.agree import rank_and_world
from dtplan.weights.blocks import Block, blocks, source_shapes
from dtplan.weights.layouts import FileLayout, Piece

__all__ = [
    "NOTHING_FUSED",
    "StateTensor",
    "comm_device",
    "current_device",
    "mesh_device",
    "original_name",
    "state_tensors",
]

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Path segments that torch.compile and activation checkpointing put into names."""

NOTHING_FUSED: Mapping[str, Stored] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One tensor of a checkpoint, and the parameter or persistent buffer of the model that it fills, or a part of."""

    names: tuple[str, ...]
    """In checkpoints; a tied tensor has more than one."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    source: str
    """Its name, or that of the tensor of which it is a ``piece``, in the map ``stored``."""
    owners: tuple[str, ...]
    """The names of ``tensor`` in the model."""
    tensor: Tensor
    stored: Stored | None = None
    piece: Piece | None = None

    def blocks(self) -> list[Block]:
        """The blocks of it that this rank holds; see ``blocks``."""
        held = blocks(self.owners[0], self.tensor, self.stored)
        if self.stored is not None:
            held = [block for block in held if block.source == self.source]
        if self.piece is not None:
            held = [part for block in held if (part := self.piece.of(block)) is not None]
        return held

    def apart(self, layout: FileLayout) -> list[StateTensor]:
        """The tensors that files have in its place: experts one by one; nothing when it is one tensor there."""
        return [
            replace(self, names=(piece.name,), shape=piece.shape(self.shape), piece=piece)
            for piece in layout.pieces(self.source, self.shape)
        ]


def original_name(name: str) -> str:
    """``name`` as it was before torch.compile or activation checkpointing wrapped a module."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def state_tensors(model: nn.Module, stored: Mapping[str, Stored] = NOTHING_FUSED) -> list[StateTensor]:
    """The tensors of a checkpoint of ``model``, in the order of ``state_dict``; ``stored`` says which are fused.

    Asking ``state_dict`` also makes FSDP2 put its sharded parameters back, should a forward have left full
    ones.
    """
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not name.endswith("_extra_state"):
            found.setdefault(id(value), (value, []))[1].append(original_name(name))
    return [state for tensor, names in found.values() for state in _sources(tensor, tuple(names), stored)]


def _sources(tensor: Tensor, owners: tuple[str, ...], stored: Mapping[str, Stored]) -> Iterator[StateTensor]:
    """What of a checkpoint makes up ``tensor``: under each of its names the same parts, in the same order."""
    fused = [stored[owner] for owner in owners if owner in stored]
    if not fused:
        yield StateTensor(names=owners, shape=tuple(tensor.shape), source=owners[0], owners=owners, tensor=tensor)
        return
    shapes = source_shapes(owners[0], tensor, fused[0])
    for names, shape in zip(zip(*(one.lengths() for one in fused), strict=True), shapes.values(), strict=True):
        yield StateTensor(names=names, shape=shape, source=names[0], owners=owners, tensor=tensor, stored=fused[0])


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


def comm_device(model: nn.Module) -> torch.device:
    """Where the default group moves bytes: where the tensors are, or on the device of its first backend."""
    home = next((param.device for param in model.parameters() if not param.is_meta), torch.device("cpu"))
    if rank_and_world()[1] == 1:
        return home
    served = [backend.split(":")[0] for backend in dist.get_backend_config().split(",")]
    return home if home.type in served else current_device(served[0])
