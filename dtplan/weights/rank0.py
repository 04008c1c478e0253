"""Weights that only rank 0 has: it sends them tensor by tensor, and every rank keeps its own blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtplan._errors import WeightsError
from dtplan.weights.agree import Attempt, agreed, gather_objects, rank_and_world
from dtplan.weights.blocks import Block
from dtplan.weights.checkpoint import DTYPES, BlockReader, Checkpoint
from dtplan.weights.gather import pieces
from dtplan.weights.materialise import put_in
from dtplan.weights.state import state_tensors
from dtplan.weights.writer import FileTensor

__all__ = ["Broadcast", "shared_by_rank0", "take_from_rank0"]


def shared_by_rank0(open_source: Callable[[], Checkpoint]) -> Checkpoint:
    """The checkpoint that ``open_source`` finds on rank 0; the other ranks learn what it lists, and hold nothing.

    Collective over the default group. Raises the WeightsError of rank 0 on all.
    """
    here = agreed(lambda: open_source() if rank_and_world()[0] == 0 else None)
    place, tensors = gather_objects((here.place, dict(here.tensors)) if here is not None else ("", {}))[0]
    return here if here is not None else Checkpoint(place=place, tensors=tensors)


class Broadcast:
    """Reads blocks of a checkpoint that only rank 0 can read; a context manager, used as ``BlockReader`` is.

    Each tensor travels in pieces of whole rows, of which a rank copies what it keeps: one piece is all that it
    holds beyond that. All ranks ask for the same tensors in the same order. A rank that fails goes on receiving
    for the others' sake, and raises when the context ends.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._reader = BlockReader(checkpoint)
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._attempt = Attempt()

    @property
    def bytes_read(self) -> int:
        """Bytes copied out of the source: all on rank 0, none elsewhere."""
        return self._reader.bytes_read

    def __enter__(self) -> Self:
        self._reader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._reader.__exit__(kind, *rest)
        if kind is None and self._attempt.error is not None:
            raise self._attempt.error

    def each(self, name: str, blocks: Sequence[Block], use: Callable[[Tensor, Tensor], None]) -> None:
        """Calls ``use`` with parts of tensor ``name``, and the part of a block's storage for which each is.

        Collective over the default group.
        """
        entry = self._checkpoint.tensors[name]
        tensor = FileTensor(name=name, dtype=DTYPES[entry.dtype], shape=entry.shape)
        for piece in pieces(0, tensor):
            shape = (piece.stop - piece.start, *entry.shape[1:])
            received = self._receive(tensor, shape, slice(piece.start, piece.stop))
            with self._attempt:
                for block in blocks:
                    _use_rows(block, received, piece.start, use)

    def fill(self, name: str, blocks: Sequence[Block]) -> None:
        """Fills the storage of the ``blocks`` from tensor ``name``, as ``each`` does."""
        self.each(name, blocks, _copy)

    def _receive(self, tensor: FileTensor, shape: tuple[int, ...], rows: slice) -> Tensor:
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        if nbytes > self._buffer.numel():
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        piece = self._buffer[:nbytes].view(tensor.dtype).view(shape)
        if rank_and_world()[0] == 0:
            with self._attempt:
                whole = tuple(slice(0, size) for size in tensor.shape[1:])
                piece.copy_(self._reader.read(tensor.name, (rows, *whole) if tensor.shape else ()))
        if rank_and_world()[1] > 1:
            dist.broadcast(self._buffer[:nbytes], src=0)
        return piece


def _copy(part: Tensor, local: Tensor) -> None:
    local.copy_(part)


def _use_rows(block: Block, piece: Tensor, start: int, use: Callable[[Tensor, Tensor], None]) -> None:
    """Calls ``use`` for the rows that ``block`` and ``piece``, which begins at row ``start``, have in common."""
    if not block.slices:
        use(piece.view(()), block.local)
        return
    rows, *others = block.slices
    first, last = max(rows.start, start), min(rows.stop, start + len(piece))
    if first < last:
        use(piece[(slice(first - start, last - start), *others)], block.local[first - rows.start : last - rows.start])


@torch.no_grad()
def take_from_rank0(model: nn.Module) -> dict[str, Tensor]:
    """Empties ``model`` on every rank, and returns the state dict that it had on rank 0; elsewhere an empty one.

    Collective over the default group. Afterwards parameters and persistent buffers are on meta, and other
    buffers, which no checkpoint holds, are those of rank 0: the model is ready for ``parallelize`` and a load
    from rank 0. Raises WeightsError when the model is on meta on rank 0.
    """
    first = rank_and_world()[0] == 0

    def taken() -> dict[str, Tensor]:
        held = {state.names[0]: state.tensor.detach() for state in state_tensors(model)} if first else {}
        if empty := next((name for name, value in held.items() if value.is_meta), None):
            raise WeightsError(f"{empty} is on meta on rank 0, which is to give the weights: load the model there")
        return held

    held = agreed(taken)
    kept = set(model.state_dict())
    computed = {name: buffer for name, buffer in model.named_buffers() if name not in kept}
    given = gather_objects({name: buffer.cpu() for name, buffer in computed.items()} if first else {})[0]
    for name, buffer in computed.items():
        if name in given:
            home = torch.device("cpu") if buffer.is_meta else buffer.device
            put_in(buffer, given[name].to(home))
    for tensor in _kept(model, kept):
        if not tensor.is_meta:
            put_in(tensor, torch.empty_like(tensor, device="meta"))
    return held


def _kept(model: nn.Module, kept: set[str]) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from (buffer for name, buffer in model.named_buffers() if name in kept)
