"""One layer as a picture: every region of cut work, from the collective that enters it to the one that leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from dtplan.planner.bound import BoundPlan, BoundTensor
from dtplan.report.page.glyph import Glyph, glyph
from dtplan.report.page.moves import MoveView
from dtplan.report.page.tree import Row

MovesOf = Callable[[Row], list[MoveView]]
PIXELS = 96.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A parameter of at least two dims."""

    key: int
    """The row that it belongs to."""
    name: str
    tensor: BoundTensor
    glyph: Glyph
    moves: tuple[MoveView, ...]
    """What it costs to prepare this one's input alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Matrices that read the region's input, and those that make its output; moves of the branch alone around them."""

    name: str
    enter: tuple[MoveView, ...]
    first: tuple[Matrix, ...]
    between: tuple[MoveView, ...]
    """What norms over cut dims send."""
    second: tuple[Matrix, ...]
    leave: tuple[MoveView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A region: what enters, its branches, what leaves."""

    name: str
    key: int
    enter: tuple[MoveView, ...]
    branches: tuple[Branch, ...]
    leave: tuple[MoveView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """All layers that are alike, drawn as one."""

    path: str
    count: int
    numbers: str
    lanes: tuple[Lane, ...]


def layers(bound: BoundPlan, root: Row, moves: MovesOf) -> list[Layer]:
    """The FSDP units of the plan, each kind once, with their regions; those without cut work are left out."""
    units = set(bound.fsdp_units)
    found = []
    for row in root.walk():
        if row.first in units:
            sizes = [size for _, tensor in _matrices(row) for size in tensor.shape]
            lanes = tuple(_lanes(row, bound.tp, max(sizes, default=1), moves))
            if lanes:
                found.append(Layer(path=row.path, count=row.count, numbers=row.numbers, lanes=lanes))
    return found


def _lanes(row: Row, tp: int, largest: int, moves: MovesOf) -> Iterator[Lane]:
    if not _is_region(row, moves):
        for child in row.children:
            yield from _lanes(child, tp, largest, moves)
        return
    branches = [row] if _has_row_parallel(row) or not _nested(row) else _nested(row)
    made = [_branch(part, row, tp, largest, moves) for part in branches]
    inner = made[0].leave if branches == [row] else ()
    yield Lane(
        name=row.label,
        key=row.key,
        enter=tuple(_costly(moves(row), "in")),
        branches=tuple(replace(branch, leave=()) for branch in made) if inner else tuple(made),
        leave=(*inner, *_costly(moves(row), "out")),
    )


def _costly(moves: Iterable[MoveView], side: str) -> Iterator[MoveView]:
    """Those for which something is sent."""
    return (move for move in moves if move.side == side and move.costs)


def _is_region(row: Row, moves: MovesOf) -> bool:
    if row.module is not None and (row.module.shared or any(move.costs for move in moves(row))):
        return True
    return _has_row_parallel(row)


def _has_row_parallel(row: Row) -> bool:
    return any(child.module is not None and child.module.style == "rowwise" for child in row.children)


def _nested(row: Row) -> list[Row]:
    return [child for child in row.children if any(t.placement.word == "S" for _, t in _matrices(child))]


def _branch(row: Row, region: Row, tp: int, largest: int, moves: MovesOf) -> Branch:
    first: list[Matrix] = []
    second: list[Matrix] = []
    for owner, tensor in _matrices(row):
        style = None if owner.module is None else owner.module.style
        matrix = Matrix(
            key=owner.key,
            name=owner.label if tensor.name == "weight" else tensor.name if owner is row else _below(owner, tensor),
            tensor=tensor,
            glyph=glyph(tensor, tp, largest=largest, pixels=PIXELS),
            moves=() if owner is row else tuple(_costly(moves(owner), "in")),
        )
        last = tensor.placement.word == "S" and tensor.placement.dim in (len(tensor.shape) - 1, -1)
        (second if style == "rowwise" or (style is None and last) else first).append(matrix)
    inner = [each for each in row.walk() if each is not row]
    leave = [move for each in inner for move in _costly(moves(each), "out")]
    return Branch(
        name="" if row is region else row.label,
        enter=() if row is region else tuple(_costly(moves(row), "in")),
        first=tuple(first),
        between=tuple(move for each in inner for move in _costly(moves(each), "inside")),
        second=tuple(second),
        leave=tuple(leave if row is region else [*leave, *_costly(moves(row), "out")]),
    )


def _below(owner: Row, tensor: BoundTensor) -> str:
    return f"{owner.label}.{tensor.name}"


def _matrices(row: Row) -> Iterator[tuple[Row, BoundTensor]]:
    """Parameters of two dims and more, below a row and in it."""
    for each in row.walk():
        for tensor in () if each.module is None else each.module.tensors:
            if len(tensor.shape) > 1 and not tensor.buffer:
                yield each, tensor
