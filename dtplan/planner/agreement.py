"""Checks that ranks agree, made together so that every rank raises the same error and none waits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dtplan._errors import ApplyError, DtplanError

T = TypeVar("T")
_PIECE = 1 << 22
"""Elements that are read at a time by ``fingerprint``."""


def together(step: Callable[[], Any]) -> Any:
    """Run ``step`` on every rank; if it fails on any, the first failing rank's error is raised on all.

    Collective over the default group where there is one. Only ``DtplanError`` is exchanged; other exceptions
    are bugs and go their own way after the others were told.
    """
    error: Exception | None = None
    result = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001 - exchanged, then raised
        error = caught
    told = error
    if error is not None and not isinstance(error, DtplanError):
        told = ApplyError(f"rank {rank_and_world()[0]} failed: {type(error).__name__}: {error}")
    first = next((said for said in gather_objects(told) if said is not None), None)
    if first is None:
        return result
    if error is not None and (told is not error or str(error) == str(first)):
        raise error
    raise first from error


def rank_and_world() -> tuple[int, int]:
    """This rank and the number of ranks of the default process group; ``(0, 1)`` without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_objects(value: T) -> list[T]:
    """``value`` of every rank, by rank. Collective over the default group."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


def check_same_model(model: nn.Module, bound: str) -> None:
    """Every rank must hold the same model under the same plan, live on all or on the meta device on all.

    Collective over the default group; before anything whose length depends on the model.

    Raises:
        ApplyError: they do not; the same text on all ranks.
    """
    live = sum(not parameter.is_meta for parameter in model.parameters())
    said = gather_objects((hashlib.sha256(bound.encode()).hexdigest(), live))
    other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
    if other is not None:
        what = "the model or the plan is not the same"
        if said[other][0] == said[0][0]:
            what = f"{said[0][1]} parameters are live on rank 0 and {said[other][1]} on rank {other}"
        raise ApplyError(
            f"ranks 0 and {other} differ: {what}; build the same model on every rank, on the meta device on all "
            "(then dtplan.load fills it) or live on all"
        )


def check_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """A live model must have the same parameters and buffers on every rank of ``mesh``, since each cuts its own copy.

    Compares one 64-bit sum per tensor (bit patterns, weighted by position), so it costs one read of the model
    and one small collective.

    Raises:
        ApplyError: names the first tensors that differ; the same text on all ranks.
    """
    named = [(n, t) for n, t in [*model.named_parameters(), *model.named_buffers()] if not t.is_meta]
    if not named or mesh.size() == 1:
        return
    sums = torch.stack([fingerprint(tensor) for _, tensor in named]).to(mesh.device_type)
    least, most = sums.clone(), sums.clone()
    for axis in mesh.mesh_dim_names or ():
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group(axis))
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    differing = [name for (name, _), same in zip(named, (least == most).tolist(), strict=True) if not same]
    if differing:
        raise ApplyError(
            f"{len(differing)} of {len(named)} tensors differ between ranks, first {', '.join(differing[:3])}: "
            "seed every rank alike before the model is built (dtplan.init's random_seed does), or build it on the "
            "meta device and load"
        )


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit sum of the tensor's bytes that moves when any of them, or their order, changes."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE):  # in pieces, since each is widened to 64 bits
        total = total * 31 + (piece.to(torch.int64) * torch.arange(1, len(piece) + 1, device=piece.device)).sum()
    return total


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="dtplan compares the first batch among the ranks of a tp group: call the model once before fullgraph=True"
)
def check_same_inputs(values: Iterable[Any], mesh: DeviceMesh) -> None:
    """The ranks of one tp group must be given the same batch.

    Raises:
        ApplyError: they were not; the same text on all ranks of the group.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or mesh.size() == 1:
        return
    mine = torch.stack([fingerprint(t) + sum(t.shape) for t in tensors]).sum().to(mesh.device_type)
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.get_group())
    if not torch.equal(least, most):
        raise ApplyError(
            "the ranks of one tp group were given different batches: read data by data-parallel rank "
            "(dtplan.state.dp_rank of dtplan.state.dp_size), not by global rank"
        )
