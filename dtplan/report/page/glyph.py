"""A tensor as a small picture: its shape, and which part each rank of a tp group holds."""

from __future__ import annotations

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
    if stack > 1 and dim < len(shape) - 2:
        return Glyph(width=wide, height=high, slices=tuple(_cut(0, 0, wide, high, tp, (1,), down=True)))
    down = dim == len(shape) - 2 if stack > 1 else dim == 0
    parts = tuple(
        piece
        for number in range(stack)
        for piece in _cut(0, number * each, wide, each, tp, tensor.sections or (1,), down=down)
    )
    return Glyph(width=wide, height=high, slices=parts)


def _cut(
    x: float, y: float, width: float, height: float, tp: int, sections: tuple[int, ...], *, down: bool
) -> Iterator[Slice]:
    """Every section cut into ``tp`` parts; of many, those of rank 0 alone."""
    start, long = 0.0, height if down else width
    for section in sections:
        part = long * section / sum(sections)
        for rank in range(tp if tp <= MAX_SLICES else 1):
            at, thick = round(start + part * rank / tp, 2), round(part / tp, 2)
            if down:
                yield Slice(x=x, y=round(y + at, 2), width=width, height=thick, tp=rank)
            else:
                yield Slice(x=round(x + at, 2), y=y, width=thick, height=round(height, 2), tp=rank)
        start += part
