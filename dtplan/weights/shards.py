"""The output files of a save: which tensors go into which, and which rank writes which bytes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtplan.weights.agree import Attempt, agree, agreed, rank_and_world
from dtplan.weights.checkpoint import SINGLE_FILE, raw_bytes
from dtplan.weights.gather import Exchange, Held, Piece, Step, Whole, pieces_and_owners, plan_step
from dtplan.weights.staging import writing
from dtplan.weights.writer import FileTensor, ShardWriter, file_order, offsets

__all__ = ["Files", "index_of", "pack", "write_files"]

Files = Mapping[str, Sequence[int]]
"""The tensors of each file by number, in the order of the file."""


def pack(tensors: Sequence[FileTensor], max_shard_bytes: int) -> Files:
    """Which tensors go into which file, under the names that transformers gives; from global shapes alone.

    In the model's order, a file takes tensors until the next would pass ``max_shard_bytes``.
    """
    shards: list[list[int]] = [[]]
    room = max_shard_bytes
    for index, tensor in enumerate(tensors):
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(index)
        room -= tensor.nbytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    ordered = [sorted(shard, key=lambda index: file_order(tensors[index])) for shard in shards]
    return dict(zip(names if count > 1 else [SINGLE_FILE], ordered, strict=True))


def index_of(held: Sequence[Held], files: Files) -> dict[str, Any]:
    """The index that says which file holds which tensor."""
    weight_map = {held[index].tensor.name: name for name, indices in files.items() for index in indices}
    return {"metadata": {"total_size": sum(one.tensor.nbytes for one in held)}, "weight_map": weight_map}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A piece and where its bytes go."""

    piece: Piece
    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """The files that are written at once: who begins each, what each rank writes by itself, and what is moved first."""

    begins: Mapping[int, str]
    own: Sequence[_Placed]
    """Of this rank."""
    moved: Sequence[Mapping[int, _Placed]]
    """A step each: writer -> the piece that it is sent."""
    steps: Sequence[Step]
    """The same as this rank sees it."""


def write_files(
    folder: Path,
    files: Files,
    held: Sequence[Held],
    wholes: Sequence[Whole],
    *,
    writers: Sequence[int],
    device: torch.device,
) -> None:
    """Writes ``files`` into ``folder``: every rank of ``writers`` the rows that it holds, into whichever file.

    What no writer holds as whole rows is put together first, on the writers in turn. File k is begun by
    ``writers[k % len(writers)]``, and as many files are written at once as there are writers. Collective over the
    default group, which moves bytes on ``device``. Raises the same WeightsError on all ranks at the end of the round in
    which a rank could not write. At the end all is on the disk.
    """
    rank, _ = rank_and_world()
    names = list(files)
    turns = [dict(zip(writers, names[k:], strict=False)) for k in range(0, len(names), len(writers))]
    rounds = [_plan_round(turn, files, held, wholes, writers, rank) for turn in turns]
    exchange = agreed(lambda: Exchange(held, chain.from_iterable(one.steps for one in rounds), device))
    for one in rounds:
        with ExitStack() as stack:
            agreed(functools.partial(_begin, one, folder, files, held, rank, stack))
            agree(_run_round(one, exchange, folder, rank))
    # All at once and last, so that the system writes while the ranks do.
    mine = {placed.file for one in rounds for placed in (*one.own, *(step[rank] for step in one.moved if rank in step))}
    agreed(functools.partial(_sync, folder, sorted(mine | {one.begins[rank] for one in rounds if rank in one.begins})))


def _plan_round(
    begins: Mapping[int, str],
    files: Files,
    held: Sequence[Held],
    wholes: Sequence[Whole],
    writers: Sequence[int],
    rank: int,
) -> _Round:
    own, rest = [], []
    for name in begins.values():
        starts = offsets([held[index].tensor for index in files[name]])
        for index, start in zip(files[name], starts, strict=True):
            rows = wholes[index].tensor.shape[0] if wholes[index].tensor.shape else 1
            for piece, owner in pieces_and_owners(index, wholes[index], writers):
                at = start + piece.start * (wholes[index].tensor.nbytes // rows)
                placed = _Placed(piece=piece, file=name, offset=at)
                if owner is None:
                    rest.append(placed)
                elif owner == rank:
                    own.append(placed)
    names = list(begins.values())  # two ranks that write into one file wait for each other
    first = names.index(begins[rank]) if rank in begins else 0
    own.sort(key=lambda placed: (names.index(placed.file) - first) % len(names))
    count = len(writers)
    moved = [dict(zip(writers, rest[k : k + count], strict=False)) for k in range(0, len(rest), count)]
    steps = [plan_step(wholes, {to: placed.piece for to, placed in step.items()}, rank) for step in moved]
    return _Round(begins=begins, own=own, moved=moved, steps=steps)


def _begin(one: _Round, folder: Path, files: Files, held: Sequence[Held], rank: int, stack: ExitStack) -> None:
    """Makes this rank's file, if any, so that the others can write into it."""
    if rank in one.begins:
        file = folder / one.begins[rank]
        with writing(file):
            writer = stack.enter_context(closing(ShardWriter(file)))
            writer.write_header([held[index].tensor for index in files[file.name]])


def _run_round(one: _Round, exchange: Exchange, folder: Path, rank: int) -> Exception | None:
    """Writes what this rank is to write in a round; returns its first failure.

    A rank that failed goes on sending and receiving, for the others' sake.
    """
    attempt = Attempt()
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}

        def write(placed: _Placed, data: Callable[[], memoryview | Tensor]) -> None:
            if attempt.error is not None:
                return
            with attempt, writing(folder / placed.file):
                if placed.file not in writers:
                    writers[placed.file] = stack.enter_context(closing(ShardWriter.again(folder / placed.file)))
                found = data()  # raw bytes live as long as their tensor
                bytes_ = raw_bytes(found) if isinstance(found, Tensor) else found
                writers[placed.file].write_at(placed.offset, bytes_)

        for moved, step in zip(one.moved, one.steps, strict=True):
            with attempt:
                exchange.fill(step)
            exchange.move(step)
            if rank in moved:
                write(moved[rank], functools.partial(exchange.assemble, step))
        for placed in one.own:
            write(placed, functools.partial(exchange.own, placed.piece))
    return attempt.error


def _sync(folder: Path, names: Sequence[str]) -> None:
    """Waits until what this rank wrote is on the disk."""
    for name in names:
        with writing(folder / name), closing(ShardWriter.again(folder / name)) as writer:
            writer.finish()
