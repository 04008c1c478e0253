"""The mesh as a picture: a cell for every rank, a row for every tp group, a block for every replica, hosts around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan
from dtplan.report.page.tree import ranges

MAX_ROWS, MAX_BLOCKS, MAX_COLUMNS = 8, 4, 64
_GAP, _LABEL, _PAD, _BETWEEN = 14, 16, 3, 4
_WIDTH, _HEIGHT, _LARGEST, _SMALLEST = 330, 390, 36, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A rank: its place in the picture (pixels) and on the axes."""

    x: int
    y: int
    rank: int
    replicate: int
    shard: int
    tp: int
    host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A frame around ranks, with a label above or on the left."""

    x: int
    y: int
    width: int
    height: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Everything that is drawn; ``notes`` say what is not."""

    width: int
    height: int
    side: int
    cells: tuple[Cell, ...]
    hosts: tuple[Box, ...]
    blocks: tuple[Box, ...]
    numbers: bool
    """Whether a rank's number fits into its cell."""
    notes: tuple[str, ...]
    crosses: bool
    """Whether a tp group spans hosts."""
    host_count: int


def mesh(bound: BoundPlan, gpus_per_host: int) -> Mesh:
    """The picture of the degrees on hosts of ``gpus_per_host`` ranks; large meshes are drawn in part."""
    replicas, shards, tp = (bound.degrees[axis] for axis in ("replicate", "shard", "tp"))
    blocks, rows, columns = min(replicas, MAX_BLOCKS), min(shards, MAX_ROWS), min(tp, MAX_COLUMNS)
    side, across = _fit(blocks, rows, columns)
    wide, high = _span(columns, side, gpus_per_host), _span(rows, side, max(1, gpus_per_host // tp))
    label = _LABEL if replicas > 1 else 0
    cells: list[Cell] = []
    labels: list[Box] = []
    for block in range(blocks):
        left = _PAD + (block % across) * (wide + _GAP)
        top = _PAD + (block // across) * (high + _GAP + label) + label
        labels.append(Box(x=left, y=top, width=wide, height=high, label=f"replica {block}" if label else ""))
        for row in range(rows):
            y = top + _at(row, side, max(1, gpus_per_host // tp))
            for column in range(columns):
                x, rank = left + _at(column, side, gpus_per_host), (block * shards + row) * tp + column
                host = rank // gpus_per_host
                cells.append(Cell(x=x, y=y, rank=rank, replicate=block, shard=row, tp=column, host=host))
    ranks = replicas * shards * tp
    return Mesh(
        width=2 * _PAD + min(blocks, across) * (wide + _GAP) - _GAP,
        height=max(cell.y for cell in cells) + side + _PAD,
        side=side,
        cells=tuple(cells),
        hosts=tuple(_hosts(cells, side, ranks, gpus_per_host)),
        blocks=tuple(labels),
        numbers=side >= 10 + 6 * len(str(cells[-1].rank)),
        notes=tuple(_notes(bound, blocks, rows, columns)),
        crosses=min(tp, ranks) > gpus_per_host or (ranks > gpus_per_host and gpus_per_host % tp != 0),
        host_count=-(-ranks // gpus_per_host),
    )


def _fit(blocks: int, rows: int, columns: int) -> tuple[int, int]:
    """The side of a cell and the blocks side by side: the largest cells with which all of it is on one screen."""
    for side in range(_LARGEST, _SMALLEST, -2):
        across = max(1, min(blocks, (_WIDTH + _GAP) // (columns * side + _GAP)))
        if columns * side <= _WIDTH and -(-blocks // across) * (rows * side + _GAP) <= _HEIGHT:
            return side, across
    return _SMALLEST, 1


def _at(number: int, side: int, group: int) -> int:
    """Where cell ``number`` of a line begins, with a gap after every ``group``."""
    return number * side + number // group * _BETWEEN


def _span(count: int, side: int, group: int) -> int:
    return _at(count - 1, side, group) + side


def _hosts(cells: list[Cell], side: int, ranks: int, gpus: int) -> Iterator[Box]:
    """A frame for what a block holds of a host, where that is a rectangle."""
    together: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        together.setdefault((cell.replicate, cell.host), []).append(cell)
    for (_, host), held in together.items():
        xs, ys = sorted({cell.x for cell in held}), sorted({cell.y for cell in held})
        if len(xs) * len(ys) == len(held):
            numbers = [str(rank) for rank in range(host * gpus, min((host + 1) * gpus, ranks))]
            yield Box(
                x=xs[0],
                y=ys[0],
                width=xs[-1] - xs[0] + side,
                height=ys[-1] - ys[0] + side,
                label=f"host {host}: ranks {ranges(numbers)}",
            )


def _notes(bound: BoundPlan, blocks: int, rows: int, columns: int) -> Iterator[str]:
    more = bound.degrees["replicate"] - blocks
    if more:
        yield f"{more} more replica{'s' * (more > 1)} like {'these' if blocks > 1 else 'this one'}"
    if more := bound.degrees["shard"] - rows:
        yield f"{more} more tp groups in each replica" if blocks > 1 else f"{more} more tp groups below"
    if more := bound.tp - columns:
        yield f"{more} more ranks in each tp group"
