"""Whether two checkpoints hold the same tensors: names, shapes, dtypes and bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from dtplan.weights.checkpoint import DTYPES, BlockReader, Checkpoint
from dtplan.weights.gather import pieces
from dtplan.weights.writer import FileTensor

__all__ = ["Difference", "differences"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor that is not the same, and how."""

    name: str
    """In the first checkpoint."""
    says: str


def differences(
    first: Checkpoint, second: Checkpoint, names: Mapping[str, str], left_out: Collection[str] = ()
) -> Iterator[Difference]:
    """What of ``first`` is otherwise in ``second``, and what either lacks.

    ``names`` maps names of the first to names of the second, where they are not the same; ``left_out`` are names of
    the first that need not be in the second. Bytes are compared in pieces, so that neither is ever held as a whole.
    """
    wanted = {name: names.get(name, name) for name in first.tensors if name not in left_out}
    with BlockReader(first) as ours, BlockReader(second) as theirs:
        for name, other in wanted.items():
            if other not in second.tensors:
                yield Difference(name=name, says="is not there")
            elif says := _difference(ours, first, name, theirs, second, other):
                yield Difference(name=name, says=says)
    for other in sorted(second.tensors.keys() - set(wanted.values())):
        yield Difference(name=other, says="was not there before")


def _difference(
    ours: BlockReader, first: Checkpoint, name: str, theirs: BlockReader, second: Checkpoint, other: str
) -> str:
    one, two = first.tensors[name], second.tensors[other]
    if one.shape != two.shape:
        return f"shape {list(one.shape)}, then {list(two.shape)}"
    if one.dtype != two.dtype:
        return f"dtype {one.dtype}, then {two.dtype}"
    tensor = FileTensor(name=name, dtype=DTYPES[one.dtype], shape=one.shape)
    differing = 0
    for piece in pieces(0, tensor):
        rows = (slice(piece.start, piece.stop), *(slice(0, size) for size in one.shape[1:])) if one.shape else ()
        bits = [reader.read(key, rows).contiguous().view(-1) for reader, key in ((ours, name), (theirs, other))]
        differing += int((bits[0].view(torch.uint8) != bits[1].view(torch.uint8)).sum())
    return f"{differing} of {tensor.nbytes} bytes differ" if differing else ""
