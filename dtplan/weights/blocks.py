"""Which parts of a checkpoint's tensors lie where in this rank's storage of one parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dtplan.planner.stored import Run, Stored
from dtplan.weights.slices import local_part

__all__ = ["Block", "blocks", "source_shapes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of this rank's storage, ``local``, and the part of a checkpoint's tensor that belongs there."""

    source: str
    """The name of the checkpoint's tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor ``source``."""
    slices: tuple[slice, ...]
    """The part of ``source``, one slice per dim; as large as ``local``."""
    local: Tensor
    """A view: what is written into it is in the parameter."""


def blocks(name: str, tensor: Tensor, stored: Stored | None = None) -> list[Block]:
    """The blocks that make up this rank's storage of ``tensor``, in its order; none when it holds nothing.

    Without ``stored`` there is one, of a checkpoint's tensor of the same name and shape. With it there is one for
    every run of rows that lie together here and in the checkpoint: ``_StridedShard`` and the order of fused parts
    end here. ``tensor`` is a parameter, or a gradient or a moment that is placed as the parameter is.

    Raises:
        WeightsError: it starts with ``name``: this rank's part is a partial sum or is not cut as torch.chunk cuts.
    """
    local, kept = local_part(name, tensor)
    if not local.numel():
        return []
    if stored is None:
        return [Block(source=name, shape=tuple(tensor.shape), slices=kept, local=local)]
    shapes = source_shapes(name, tensor, stored)
    dim, first = stored.dim, kept[stored.dim].start
    runs = stored.runs(first, kept[dim].stop)
    return [
        Block(
            source=run.source,
            shape=shapes[run.source],
            slices=(*kept[:dim], slice(run.start, run.start + run.size), *kept[dim + 1 :]),
            local=local.narrow(dim, run.at - first, run.size),
        )
        for run in (runs if stored.shared else _joined(runs))  # ranks that share a part have the same blocks of it
    ]


def source_shapes(name: str, tensor: Tensor, stored: Stored | None = None) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors that make up ``tensor``, whole or cut: their names, in order, and whole shapes."""
    shape = tuple(tensor.shape)
    if stored is None:
        return {name: shape}
    dim = stored.dim
    return {source: (*shape[:dim], length, *shape[dim + 1 :]) for source, length in stored.lengths().items()}


def _joined(runs: Iterator[Run]) -> Iterator[Run]:
    """Runs that follow each other in the source, too, as one: at tp 1 the parts of one tensor are one block."""
    last: Run | None = None
    for run in runs:
        if last is not None and (run.source, run.start) == (last.source, last.start + last.size):
            last = Run(at=last.at, source=last.source, start=last.start, size=last.size + run.size)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
