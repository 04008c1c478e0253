"""The mesh as a picture: a cell for every rank, a row for every tp group, a block for every replica, hosts around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan
from dtplan.report.page.tree import ranges

MAX_ROWS, MAX_BLOCKS, MAX_COLUMNS = 8, 4, 64
_GAP, _LABEL, _PAD = 14, 14, 4


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
    notes: tuple[str, ...]
    crosses: bool
    """Whether a tp group spans hosts."""
    host_count: int


def mesh(bound: BoundPlan, gpus_per_host: int) -> Mesh:
    """The picture of the degrees on hosts of ``gpus_per_host`` ranks; large meshes are drawn in part."""
    replicas, shards, tp = (bound.degrees[axis] for axis in ("replicate", "shard", "tp"))
    side = 28 if tp <= 8 else 18 if tp <= 16 else 12
    blocks, rows, columns = min(replicas, MAX_BLOCKS), min(shards, MAX_ROWS), min(tp, MAX_COLUMNS)
    across = _across(blocks, columns * side)
    width, height = columns * side, rows * side
    cells: list[Cell] = []
    frames: list[Box] = []
    for block in range(blocks):
        left = _PAD + (block % across) * (width + _GAP)
        top = _PAD + (block // across) * (height + _GAP + _LABEL) + (_LABEL if replicas > 1 else 0)
        frames.append(Box(x=left, y=top, width=width, height=height, label=f"replica {block}" if replicas > 1 else ""))
        for row in range(rows):
            for column in range(columns):
                rank = (block * shards + row) * tp + column
                place = {"x": left + column * side, "y": top + row * side, "host": rank // gpus_per_host}
                cells.append(Cell(rank=rank, replicate=block, shard=row, tp=column, **place))
    ranks = replicas * shards * tp
    return Mesh(
        width=2 * _PAD + min(blocks, across) * (width + _GAP) - _GAP,
        height=max(cell.y for cell in cells) + side + _PAD,
        side=side,
        cells=tuple(cells),
        hosts=tuple(_hosts(cells, side, ranks, gpus_per_host)),
        blocks=tuple(frames),
        notes=tuple(_notes(bound, blocks, rows, columns)),
        crosses=min(tp, ranks) > gpus_per_host or (ranks > gpus_per_host and gpus_per_host % tp != 0),
        host_count=-(-ranks // gpus_per_host),
    )


def _across(blocks: int, width: int) -> int:
    """Blocks side by side, as many as a narrow screen takes."""
    return max(1, min(blocks, 330 // (width + _GAP)))


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
