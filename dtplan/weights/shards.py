"""The output files of a save: which tensors go into which, and the rounds in which the ranks write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from dtplan.weights.agree import Attempt, agree, agreed, rank_and_world
from dtplan.weights.checkpoint import SINGLE_FILE
from dtplan.weights.gather import Exchange, Held, Step, Whole, pieces, plan_step
from dtplan.weights.staging import writing
from dtplan.weights.writer import FileTensor, ShardWriter, file_order

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


def write_files(
    folder: Path,
    files: Files,
    held: Sequence[Held],
    wholes: Sequence[Whole],
    *,
    writers: Sequence[int],
    device: torch.device,
) -> None:
    """Writes ``files`` into ``folder``, file k by ``writers[k % len(writers)]``, one file of each at a time.

    Collective over the default group, which moves bytes on ``device``. Raises the same WeightsError on all
    ranks at the end of the round in which a rank could not write.
    """
    rank, _ = rank_and_world()
    names = list(files)
    rounds = [dict(zip(writers, names[k:], strict=False)) for k in range(0, len(names), len(writers))]
    plans = [_plan_round(wholes, {to: files[name] for to, name in turn.items()}, rank) for turn in rounds]
    exchange = agreed(lambda: Exchange(held, chain.from_iterable(plans), device))
    for turn, steps in zip(rounds, plans, strict=True):
        agree(_run_round(exchange, steps, folder / turn[rank] if rank in turn else None, files, held))


def _plan_round(wholes: Sequence[Whole], contents: Mapping[int, Sequence[int]], rank: int) -> list[Step]:
    """The steps in which each writer, a key of ``contents``, receives its file's tensors piece by piece."""
    queues = [
        [piece for index in indices for piece in pieces(index, wholes[index].tensor)] for indices in contents.values()
    ]
    rows = [zip(contents, row, strict=True) for row in zip_longest(*queues)]
    return [plan_step(wholes, {to: piece for to, piece in row if piece is not None}, rank) for row in rows]


def _run_round(
    exchange: Exchange, steps: Sequence[Step], file: Path | None, files: Files, held: Sequence[Held]
) -> Exception | None:
    """Runs the steps of a round and writes this rank's ``file``, if any; returns its first failure.

    A rank that failed goes on sending and receiving, for the others' sake.
    """
    attempt = Attempt()
    with ExitStack() as stack:
        writer = None
        if file is not None:
            with attempt, writing(file):
                writer = stack.enter_context(closing(ShardWriter(file)))
                writer.write_header([held[index].tensor for index in files[file.name]])
        for step in steps:
            with attempt:
                exchange.fill(step)
            exchange.move(step)
            if writer is not None and file is not None and step.piece is not None and attempt.error is None:
                with attempt, writing(file):
                    writer.write(exchange.assemble(step))
        if writer is not None and file is not None and attempt.error is None:
            with attempt, writing(file):
                writer.finish()
    return attempt.error
