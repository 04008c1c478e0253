"""Which block of a global tensor a rank keeps, as one slice per dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dtplan._errors import WeightsError

__all__ = ["block_slices", "local_part", "local_slices"]


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, stop)`` of chunk ``index`` when ``torch.chunk`` cuts ``size`` rows: ceil first."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def cut_order(dim: int, axes: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The mesh axes that cut ``dim``, the first cut first.

    ``Shard`` axes cut from left to right. ``_StridedShard(split_factor=n)`` says that the dim was in n pieces
    before this axis cut it: FSDP2 marks its axis so when the axes to its right (tp) cut the same dim. Any
    other factor interleaves rows and raises WeightsError.
    """
    order: list[int] = []
    for axis in reversed(axes):
        factor = int(getattr(placements[axis], "split_factor", 1))
        if factor == 1:
            order.insert(0, axis)
        elif factor == math.prod(mesh_shape[done] for done in order):
            order.append(axis)
        else:
            raise WeightsError(
                f"placement {placements[axis]} on mesh axis {axis} interleaves dim {dim}, so a rank keeps "
                "several blocks, and dtplan reads and writes one block per tensor; "
                f"use Shard({dim}), then fully_shard"
            )
    return order


def block_slices(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[slice, ...]:
    """The block, perhaps empty, of a tensor of ``shape`` at ``coordinate`` of a mesh of ``mesh_shape``.

    One slice per dim; integer arithmetic only. Raises WeightsError when the kept part is a partial sum or is
    not one block.
    """
    cutting: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise WeightsError(f"placement {placement} on mesh axis {axis} holds a partial sum, not weights")
        if not placement.is_replicate() and mesh_shape[axis] > 1:
            dim: int = getattr(placement, "dim")  # noqa: B009 - Shard and _StridedShard share no class that has it
            cutting.setdefault(dim % len(shape), []).append(axis)
    bounds = [(0, size) for size in shape]
    for dim, axes in cutting.items():
        for axis in cut_order(dim, axes, mesh_shape, placements):
            first, last = bounds[dim]
            start, stop = chunk_bounds(last - first, mesh_shape[axis], coordinate[axis])
            bounds[dim] = (first + start, first + stop)
    return tuple(slice(start, stop) for start, stop in bounds)


def local_slices(param: DTensor) -> tuple[slice, ...]:
    """The block of the global tensor that this rank keeps, one slice per dim.

    Raises WeightsError when this rank is outside the mesh, or when what it keeps is not one block.
    """
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise WeightsError(f"this rank is not in the mesh {mesh}: build the mesh over all ranks of the job")
    block = block_slices(param.shape, mesh.shape, param.placements, coordinate)
    due = tuple(part.stop - part.start for part in block)
    held = tuple(param.to_local().shape)
    if due != held and (math.prod(due) or math.prod(held)):
        raise WeightsError(
            f"shape {tuple(param.shape)} placed {param.placements} leaves {due} to this rank, but it holds "
            f"{held}; shard the tensor as torch.chunk cuts, with distribute_tensor and fully_shard"
        )
    return block


def local_part(name: str, tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's storage of ``tensor`` and the block that it holds; all of it for a plain tensor.

    Raises WeightsError, which starts with ``name``, where ``local_slices`` does.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    try:
        with torch.no_grad():
            return tensor.to_local(), local_slices(tensor)
    except WeightsError as error:
        raise WeightsError(f"{name}: {error}") from error
