"""A tensor as a small picture: its shape, and which part each rank of a tp group holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundTensor

MAX_SLICES, MAX_STACK = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part that rank ``tp`` of a tp group holds, in pixels."""

    x: float
    y: float
    width: float
    height: float
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyph:
    """A tensor's outline in pixels and the parts of it; no parts where every rank holds all."""

    width: float
    height: float
    slices: tuple[Slice, ...]


def glyph(tensor: BoundTensor, tp: int, *, largest: int, pixels: float) -> Glyph:
    """The picture; a dim of ``largest`` is ``pixels`` long, others go with the square root of their size.

    The first dim goes down, the last one across. Of three dims the first is a stack of matrices.
    """

    def length(size: int) -> float:
        return round(max(9.0, pixels * math.sqrt(size / largest)), 1)

    shape = tensor.shape or (1,)
    stack = min(math.prod(shape[:-2]), MAX_STACK) if len(shape) > 2 and shape[-1] > 1 and shape[-2] > 1 else 1
    rows, columns = (shape[-2], shape[-1]) if stack > 1 else (shape[0], math.prod(shape[1:]))
    high, wide = length(rows), length(columns) if len(shape) > 1 else 9.0
    each = high / stack if stack > 1 else high
    dim = tensor.placement.dim
    if tensor.placement.word != "S" or dim is None:
        return Glyph(width=wide, height=high, slices=())
    dim = dim % len(shape)
    sections = list(zip(tensor.sections or (1,), tensor.copies or itertools.repeat(1), strict=False))
    if stack > 1 and dim < len(shape) - 2:  # the stack itself is cut
        return Glyph(width=wide, height=high, slices=tuple(_cut(0, wide, high, tp, [(1, 1)], down=True)))
    down = dim == len(shape) - 2 if stack > 1 else dim == 0
    parts = [piece for n in range(stack) for piece in _cut(n * each, wide, each, tp, sections, down=down)]
    return Glyph(width=wide, height=high, slices=tuple(parts))


def _cut(
    y: float, width: float, height: float, tp: int, sections: list[tuple[int, int]], *, down: bool
) -> Iterator[Slice]:
    """Every section cut over the ranks, or over groups of ``copies`` that hold the same; of many, rank 0's alone."""
    start, long, total = 0.0, height if down else width, sum(rows for rows, _ in sections)
    for rows, copies in sections:
        part = long * rows / total
        for rank in range(tp if tp <= MAX_SLICES else 1):
            thick = part * copies / tp
            at, thin = round(start + rank // copies * thick, 2), round(thick, 2)
            if down:
                yield Slice(x=0, y=round(y + at, 2), width=width, height=thin, tp=rank)
            else:
                yield Slice(x=at, y=y, width=thin, height=round(height, 2), tp=rank)
        start += part
