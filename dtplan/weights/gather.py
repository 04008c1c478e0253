"""Whole tensors from blocks, in pieces of rows: a rank writes what it holds whole, the rest is sent to its writer.

A step moves at most one piece to each writer, by one ``all_to_all_single`` of bytes that all ranks enter. So
the ranks stay in step on gloo and NCCL alike, all writers work at once, and a rank holds a piece, not a
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dtplan._errors import WeightsError
from dtplan.weights.agree import rank_and_world
from dtplan.weights.writer import FileTensor

__all__ = [
    "Box",
    "Exchange",
    "Held",
    "Piece",
    "Step",
    "Whole",
    "pieces",
    "pieces_and_owners",
    "plan_step",
    "whole_tensors",
]

PIECE_BYTES = 64 * 2**20

Box = tuple[tuple[int, int], ...]
"""``(start, stop)`` per dim of the global tensor; a scalar counts as one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of one tensor: for each of its blocks the storage, which has at least one dim."""

    tensor: FileTensor
    blocks: Mapping[Box, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One tensor and, for each distinct block of it, the ranks that hold the block, lowest first."""

    tensor: FileTensor
    holders: Mapping[Box, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows ``[start, stop)`` of tensor number ``index``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part of a piece that one rank sends to its writer: ``box`` of tensor number ``index``, out of a ``block``."""

    peer: int
    """The writer, to the rank that sends; the sender, to the writer."""
    index: int
    block: Box
    box: Box
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective as this rank sees it: the piece that it writes, if any, and its segments, by peer."""

    piece: Piece | None
    sends: tuple[Segment, ...]
    receives: tuple[Segment, ...]


def whole_tensors(tensors: Sequence[FileTensor], boxes: Sequence[Sequence[Sequence[Box]]]) -> list[Whole]:
    """Joins what the ranks hold: ``boxes[rank][index]`` are the blocks of ``tensors[index]`` on ``rank``.

    Raises WeightsError when the blocks of a tensor do not add up to it.
    """
    wholes = []
    for index, tensor in enumerate(tensors):
        holders: dict[Box, list[int]] = {}
        for rank, held in enumerate(boxes):
            for box in held[index]:
                holders.setdefault(box, []).append(rank)
        total, due = sum(map(_volume, holders)), math.prod(tensor.shape)
        if total != due:
            raise WeightsError(
                f"{tensor.name}: the ranks hold {total} different elements of {due}; save from all ranks of "
                "the model's mesh, with the same model on each"
            )
        wholes.append(Whole(tensor=tensor, holders={box: tuple(ranks) for box, ranks in holders.items()}))
    return wholes


def pieces(index: int, tensor: FileTensor, cuts: Iterable[int] = ()) -> list[Piece]:
    """``tensor`` in bands of whole rows of at most ``PIECE_BYTES``, or one row; none when it is empty.

    No band goes over a row of ``cuts``.
    """
    if not tensor.nbytes:
        return []
    rows = tensor.shape[0] if tensor.shape else 1
    band = max(1, PIECE_BYTES * rows // tensor.nbytes)
    edges = sorted({0, rows, *cuts})
    return [
        Piece(index=index, start=start, stop=min(start + band, last))
        for first, last in pairwise(edges)
        for start in range(first, last, band)
    ]


def pieces_and_owners(index: int, whole: Whole, writers: Sequence[int]) -> Iterator[tuple[Piece, int | None]]:
    """The pieces of one tensor, each with the one of ``writers`` that holds all of it; None: it must be put together.

    Of several, one is taken for all pieces of a block, and another for the next tensor.
    """
    edges = {edge for box in whole.holders for edge in box[0]}
    columns = tuple((0, size) for size in whole.tensor.shape[1:])
    for piece in pieces(index, whole.tensor, edges):
        rows = [box for box in whole.holders if box[1:] == columns and _covers(box[0], piece)]
        able = [rank for box in rows for rank in whole.holders[box] if rank in writers]
        yield piece, able[index % len(able)] if able else None


def _covers(rows: tuple[int, int], piece: Piece) -> bool:
    return rows[0] <= piece.start and piece.stop <= rows[1]


def plan_step(wholes: Sequence[Whole], incoming: Mapping[int, Piece], rank: int) -> Step:
    """The step in which each writer, a key of ``incoming``, receives its piece, as ``rank`` sees it."""
    sends, receives = [], []
    for writer, piece in sorted(incoming.items()):
        whole = wholes[piece.index]
        for box, holders in whole.holders.items():
            # The nearest rank by number is the writer itself or, most likely, on its host.
            sender = min(holders, key=lambda holder: abs(holder - writer))
            cut = _rows(box, piece)
            nbytes = _volume(cut) * whole.tensor.dtype.itemsize
            if nbytes and rank == sender:
                sends.append(Segment(peer=writer, index=piece.index, block=box, box=cut, nbytes=nbytes))
            if nbytes and rank == writer:
                receives.append(Segment(peer=sender, index=piece.index, block=box, box=cut, nbytes=nbytes))
    receives.sort(key=lambda segment: segment.peer)
    return Step(piece=incoming.get(rank), sends=tuple(sends), receives=tuple(receives))


class Exchange:
    """Moves pieces from the ranks that hold their blocks to the ranks that write them.

    The buffers for the largest of ``steps`` are allocated here, so that no rank runs out of memory alone in
    the midst of a collective. ``device`` is where the default group moves bytes.
    """

    def __init__(self, held: Sequence[Held], steps: Iterable[Step], device: torch.device) -> None:
        self._held = held
        self._rank, self._world = rank_and_world()
        sent = received = whole = 0
        for step in steps:
            sent, received = max(sent, self._moved(step.sends)), max(received, self._moved(step.receives))
            whole = max(whole, sum(segment.nbytes for segment in step.receives))
        self._send = torch.empty(sent, dtype=torch.uint8, device=device)
        self._receive = torch.empty(received, dtype=torch.uint8, device=device)
        # What the file gets, as Python writes it and as torch fills it; frombuffer refuses an empty buffer.
        self._bytes = bytearray(max(whole, 1))
        self._piece = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def fill(self, step: Step) -> None:
        """Copies what this rank sends to others in ``step`` into the send buffer, in the dtypes of the files."""
        at = 0
        for segment in self._others(step.sends):
            block = self._block(segment).to(self._held[segment.index].tensor.dtype)
            self._send[at : at + segment.nbytes].copy_(block.contiguous().view(torch.uint8).view(-1))
            at += segment.nbytes

    def move(self, step: Step) -> None:
        """The collective of ``step``: all ranks of the default group enter it, whether they send or not."""
        if self._world > 1:
            received, sent = self._receive[: self._moved(step.receives)], self._send[: self._moved(step.sends)]
            dist.all_to_all_single(received, sent, self._splits(step.receives), self._splits(step.sends))

    def _others(self, segments: Iterable[Segment]) -> list[Segment]:
        """What goes to, or comes from, other ranks; a rank's own part never enters the buffers."""
        return [segment for segment in segments if segment.peer != self._rank]

    def _moved(self, segments: Iterable[Segment]) -> int:
        return sum(segment.nbytes for segment in self._others(segments))

    def _block(self, segment: Segment) -> Tensor:
        return self._held[segment.index].blocks[segment.block][_inside(segment.box, segment.block)]

    def _splits(self, segments: Iterable[Segment]) -> list[int]:
        sizes = [0] * self._world
        for segment in self._others(segments):
            sizes[segment.peer] += segment.nbytes
        return sizes

    def own(self, piece: Piece) -> Tensor:
        """A piece that this rank holds as a whole, on the CPU as the file has it."""
        held = self._held[piece.index]
        frame = _frame(piece, held.tensor)
        block = next(block for block in held.blocks if block[1:] == frame[1:] and _covers(block[0], piece))
        return held.blocks[block][_inside(frame, block)].to("cpu", held.tensor.dtype).contiguous()

    def assemble(self, step: Step) -> memoryview:
        """The bytes of the piece that this rank received in ``step``; valid until the next step."""
        assert step.piece is not None
        tensor = self._held[step.piece.index].tensor
        frame = _frame(step.piece, tensor)
        nbytes = _volume(frame) * tensor.dtype.itemsize
        out = self._piece[:nbytes].view(tensor.dtype).view(_shape(frame))
        at = 0
        for segment in step.receives:
            if segment.peer == self._rank:
                block = self._block(segment)
            else:
                block = self._receive[at : at + segment.nbytes].view(tensor.dtype).view(_shape(segment.box))
                at += segment.nbytes
            out[_inside(segment.box, frame)].copy_(block)
        return memoryview(self._bytes)[:nbytes]


def _frame(piece: Piece, tensor: FileTensor) -> Box:
    return ((piece.start, piece.stop), *((0, size) for size in tensor.shape[1:]))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _volume(box: Box) -> int:
    return math.prod(_shape(box))


def _rows(box: Box, piece: Piece) -> Box:
    """The part of ``box`` inside the rows of ``piece``; its rows may be none."""
    start = max(box[0][0], piece.start)
    return ((start, max(start, min(box[0][1], piece.stop))), *box[1:])


def _inside(box: Box, frame: Box) -> tuple[slice, ...]:
    """``box`` in the coordinates of ``frame``."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, frame, strict=True))
