"""Gradient clipping that counts every element of every gradient once, however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtplan._errors import ApplyError

Axis = tuple[str, str]
"""An axis' name and its group's; ranks sort by it alike, since their axes have the same names."""
Axes = frozenset[Axis]
"""The axes over which a gradient is cut."""
Span = tuple[int, int, int, int]
"""``(dim, start, size, copies)`` of a rank's part of a tensor; ``copies`` ranks hold the same."""
_SHARED = "_dtplan_shared"
_PIECE = 1 << 13
"""Elements that a CPU adds up in one go: in one go, torch's norm of 3e7 float32 numbers is off by 2e-3."""


def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients down so that their norm is at most ``max_norm``; return the norm before.

    The norm is that of the unsharded gradients: what is cut over an axis is summed over it, what is whole or kept by
    several ranks is counted once. Plain tensors and DTensors, and DTensors on several meshes, may be mixed.
    Collective over the meshes of the gradients, at most one small all-reduce an axis. The result is a plain 0-dim
    tensor in float32 (float64 for float64 gradients), the same on every rank.

    Raises:
        ApplyError: a gradient is a partial sum; or the norm is not finite and ``error_if_nonfinite`` is set.
    """
    found = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    unique = {id(p): p for p in ([found] if isinstance(found, Tensor) else found)}
    held = [p for p in unique.values() if p.grad is not None]
    grads = [p.grad for p in held if p.grad is not None]
    norm = total_norm(grads, norm_type, shared=[getattr(p, _SHARED, ()) for p in held])
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise ApplyError(f"the gradient norm is {norm.item()}; nothing was scaled")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for device, locals_ in _by_device([_local(grad) for grad in grads]).items():
        torch._foreach_mul_(locals_, factor.to(device))
    return norm


def mark_shared(parameter: Tensor, spans: Iterable[Span]) -> None:
    """Say which parts of the rank's own part of ``parameter`` other ranks hold as well; ``spans`` are all its parts."""
    setattr(parameter, _SHARED, tuple(spans))


@torch.no_grad()
def total_norm(
    grads: Iterable[Tensor], norm_type: float = 2.0, *, shared: Sequence[tuple[Span, ...]] | None = None
) -> Tensor:
    """The norm of all ``grads`` taken as one vector; ``shared`` has the parts of each that several ranks hold."""
    grads = list(grads)
    if not grads:
        return torch.zeros(())
    groups: dict[Axis, dist.ProcessGroup] = {}
    buckets: dict[Axes, dict[int, list[Tensor]]] = {}
    for grad, spans in zip(grads, shared or [()] * len(grads), strict=True):
        local, parts = _local(grad), buckets.setdefault(_cut_axes(grad, groups), {})
        for dim, start, size, copies in spans or [(0, 0, 0, 1)]:
            parts.setdefault(copies, []).append(local.narrow(dim, start, size) if spans else local)
    device, infinite = _device_of(grads), math.isinf(norm_type)
    powers = {axes: _once(parts, norm_type, infinite=infinite).to(device) for axes, parts in buckets.items()}
    summed = _over_axes(powers, groups, infinite=infinite)
    return summed if infinite else summed ** (1.0 / norm_type)


def _once(parts: dict[int, list[Tensor]], norm_type: float, *, infinite: bool) -> Tensor:
    """The power of the rank's parts, of which each of n ranks counts an n-th where they hold the same."""
    powers = [_power(parts[copies], norm_type) / (1 if infinite else copies) for copies in sorted(parts)]
    return torch.stack(powers).max() if infinite else torch.stack(powers).sum()


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _device_of(grads: list[Tensor]) -> torch.device:
    """Where the ranks can talk: gradients may be offloaded to the host while their mesh is of GPUs."""
    meshes = [grad.device_mesh for grad in grads if isinstance(grad, DTensor)]
    return torch.device(meshes[0].device_type) if meshes else grads[0].device


def _cut_axes(grad: Tensor, groups: dict[Axis, dist.ProcessGroup]) -> Axes:
    if not isinstance(grad, DTensor):
        return frozenset()
    cut = []
    for i, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ApplyError(f"a gradient of shape {list(grad.shape)} is still a partial sum: {grad.placements}")
        if not placement.is_replicate() and grad.device_mesh.size(i) > 1:
            group = grad.device_mesh.get_group(i)
            axis = ((grad.device_mesh.mesh_dim_names or ())[i : i + 1] or (str(i),))[0], group.group_name
            groups[axis] = group
            cut.append(axis)
    return frozenset(cut)


def _power(tensors: list[Tensor], norm_type: float) -> Tensor:
    """The sum of the p-th powers, or the largest magnitude, of this rank's parts."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    parts = []
    for device, whole in _by_device([t for t in tensors if t.numel()]).items():
        pieces = [p for t in whole for p in t.reshape(-1).split(_PIECE)] if device.type == "cpu" else whole
        norms = torch.stack([n.to(dtype) for n in torch._foreach_norm(pieces, norm_type, dtype=dtype)])
        parts.append(norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum())
    if not parts:
        return torch.zeros((), dtype=dtype)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def _over_axes(powers: dict[Axes, Tensor], groups: dict[Axis, dist.ProcessGroup], *, infinite: bool) -> Tensor:
    """All buckets joined: each is reduced over the axes along which it is cut, together where they share one."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in powers.values()) else torch.float32
    powers = {axes: power.to(dtype) for axes, power in powers.items()}

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b) if infinite else a + b

    # An axis that every rank of the mesh knows to be cut is reduced; ranks agree, since placements are global.
    for axis in sorted(groups):
        axes_here = sorted((axes for axes in powers if axis in axes), key=sorted)
        values = torch.stack([powers.pop(axes) for axes in axes_here])
        dist.all_reduce(values, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=groups[axis])
        for axes, value in zip(axes_here, values.unbind(), strict=True):
            rest = axes - {axis}
            powers[rest] = join(powers[rest], value) if rest in powers else value
    (result,) = powers.values()
    return result


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
