"""From which index moves which column to what a plan says of a dim: one piece in units, sections, or whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dtplan.author.depend import Dependence

_MOST_RUNS = 6
Kind = Literal["whole", "cut", "apart", "idle", "tangled"]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows: ``count`` units, one after another; ``whole`` where every one of them moves every column."""

    rows: int
    count: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Lies:
    """How a parameter or an input lies towards the columns of a group."""

    kind: Kind
    """``apart``: it moves no column (it comes after them); ``idle``: it moves nothing, so that it has no gradient;
    ``tangled``: no cut in one order fits."""
    dim: int = 0
    parts: tuple[Part, ...] = ()
    seen: str = ""
    """Of a tangled one: which rows belong together, in short."""
    groups: int = 1
    """Of an input: how often all units stand one after another in its dim (BLOOM's batch x heads)."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The columns of a group's last products: which hang together, and which rows every rank needs."""

    component: Tensor
    """Of each column; columns of one component must lie on one rank."""
    components: int
    in_order: bool
    """Whether components are contiguous and of one size."""
    shares: bool
    """Whether rows that reach over components (a kv head that all heads read) are kept by every rank."""


def columns_of(parameters: Mapping[str, Dependence], count: int) -> Columns:
    """Columns that an index moves hang together; those of an index that moves all of them do not by that, nor those
    of the only index, which every rank has.

    Where then all hang together (one k and one v for all heads), indices that move columns far from each other are
    taken to be kept by every rank.
    """
    rows = [_some(dim) for dependence in parameters.values() for dim in dependence.dims if len(dim) > 1]
    every = torch.cat(rows) if rows else torch.zeros(0, count, dtype=torch.bool)
    component = _components(every)
    shares = bool(len(every)) and int(component.max()) == 0
    if shares:
        component = _components(every[[_is_run(row) for row in every]])
    runs = _runs(component.tolist())
    in_order = _even(runs) and len(runs) == int(component.max()) + 1
    return Columns(component, int(component.max()) + 1, in_order=in_order, shares=shares)


def _components(rows: Tensor) -> Tensor:
    """The component of each column, counted in the order of the columns."""
    component = torch.arange(rows.shape[1])
    for row in rows.unique(dim=0) if len(rows) else rows:
        touched = component[row].unique()
        component[torch.isin(component, touched)] = touched[0]
    names = list(dict.fromkeys(component.tolist()))
    return torch.tensor([names.index(one) for one in component.tolist()])


def lies(dependence: Dependence, columns: Columns, known: AbstractSet[int]) -> Lies:
    """How the parameter is to be cut; ``known`` are numbers of units that a config field counts."""
    if not dependence.moves_columns:
        return Lies("apart")
    dims = [d for d, rows in enumerate(dependence.dims) if len(rows) > 1 and len(_some(rows))]
    dims = [d for d in dims if not all(row < 0 for row in _labels(dependence.dims[d], columns))]
    if not dims or columns.components < 2:
        return Lies("whole")
    if len(dims) > 1:
        return Lies("tangled", dims[0])
    rows = dependence.dims[dims[0]]
    parts = _parts(rows, columns, known)
    return Lies("tangled", dims[0], seen=_order(rows, columns)) if parts is None else Lies("cut", dims[0], parts)


def input_lies(dependence: Dependence, columns: Columns, known: AbstractSet[int]) -> Lies:
    """How an input is to be cut: as a parameter, or in groups of all units."""
    dims = [d for d, rows in enumerate(dependence.dims) if _moves_apart(rows, columns)]
    if len(dims) != 1:
        return Lies("whole")
    parts = _parts(dependence.dims[dims[0]], columns, known)
    if parts is None or any(part.whole for part in parts) or len({part.count for part in parts}) > 1:
        return Lies("tangled", dims[0])
    return Lies("cut", dims[0], parts[:1], groups=len(parts))


def _moves_apart(rows: Tensor, columns: Columns) -> bool:
    """Whether each index moves columns of one component only."""
    if columns.components < 2 or len(rows) < 2:
        return False
    return all(row >= 0 for row in _labels(rows, columns))


def _some(rows: Tensor) -> Tensor:
    """Rows that move some columns and not all."""
    return rows[rows.any(dim=1) & ~rows.all(dim=1)]


def _labels(rows: Tensor, columns: Columns) -> list[int]:
    """The component of each row; -1 where it reaches over all of several, -2 where it moves nothing."""
    labels = []
    for row in rows:
        touched = columns.component[row].unique().tolist()
        labels.append(-2 if not touched else touched[0] if len(touched) == 1 else -1)
    return labels


def _parts(rows: Tensor, columns: Columns, known: AbstractSet[int]) -> tuple[Part, ...] | None:
    """The sections of a dim: in each, every component comes once, in order; None where it is not so."""
    parts: list[Part] = []
    start, expected, begun = 0, 0, 0
    for label, length in _runs(_labels(rows, columns)):
        if label == -1 and expected == 0:
            parts.append(Part(rows=length, count=1, whole=True))
            begun = start + length
        elif label == expected:
            expected += 1
            if expected == columns.components:
                section = _section(rows[begun : start + length], columns.components, known)
                if section is None:
                    return None
                parts.append(section)
                expected, begun = 0, start + length
        else:
            return None
        start += length
    return tuple(parts) if expected == 0 else None


def _order(rows: Tensor, columns: Columns) -> str:
    """`rows 0-7 unit 0, 8-15 unit 2, ...`."""
    told, start = [], 0
    for label, length in _runs(_labels(rows, columns))[:_MOST_RUNS]:
        what = {-1: "all units", -2: "none"}.get(label, f"unit {label}")
        told.append(f"{start}-{start + length - 1} {what}" if length > 1 else f"{start} {what}")
        start += length
    return f"rows {', '.join(told)}" + (", ..." if start < len(rows) else "")


def _section(rows: Tensor, components: int, known: AbstractSet[int]) -> Part | None:
    """Rows with every component once, in the finest blocks that the config counts: heads, where kv heads must be."""
    blocks: list[list[int]] = []  # first column, last column, rows
    for row in rows:
        moved = row.nonzero().flatten()
        first, last = int(moved[0]), int(moved[-1])
        if blocks and first <= blocks[-1][1]:
            blocks[-1][1:] = [max(blocks[-1][1], last), blocks[-1][2] + 1]
        else:
            blocks.append([first, last, 1])
    even = len({block[2] for block in blocks}) == 1
    count = len(blocks) if even and len(blocks) in known and len(blocks) % components == 0 else components
    return Part(rows=len(rows), count=count) if len(rows) % count == 0 else None


def _is_run(row: Tensor) -> bool:
    moved = row.nonzero().flatten()
    return int(moved[-1] - moved[0]) + 1 == len(moved)


def _runs(labels: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours that are equal, with how many they are."""
    found: list[tuple[int, int]] = []
    for label in labels:
        if found and found[-1][0] == label:
            found[-1] = (label, found[-1][1] + 1)
        else:
            found.append((label, 1))
    return found


def _even(runs: Sequence[tuple[int, int]]) -> bool:
    return len({length for _, length in runs}) == 1
