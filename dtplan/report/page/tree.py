"""The module tree of a bound plan, with what is built alike and numbered collapsed into one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dtplan.planner.bound import BoundModule, BoundPlan, dtype_bytes

Signature = tuple[int | None, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of the parameters of a subtree: of the model, and of rank 0 after tp and shard; ties count once."""

    model: int = 0
    cut: int = 0
    """Of what tp cuts, on rank 0."""
    whole: int = 0
    """Of what every rank of a tp group holds whole, on rank 0."""

    @property
    def rank(self) -> int:
        """Bytes on rank 0."""
        return self.cut + self.whole


@dataclass(slots=True, kw_only=True)
class Row:
    """A line of the tree: ``count`` modules that are alike, of which ``numbers`` are the last segments."""

    key: int
    path: str
    """As a pattern: `*` stands for the numbers."""
    label: str
    level: int
    count: int
    numbers: str
    """Ranges such as `0-79`; empty where the name is no number."""
    module: BoundModule | None
    first: str
    """The full name of the first module of the row."""
    held: Held
    children: list[Row] = field(default_factory=list)

    def walk(self) -> Iterator[Row]:
        """The row and all below it, in the model's order."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(slots=True)
class _Node:
    module: BoundModule | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    signature: int = -1


def tree(bound: BoundPlan) -> Row:
    """The root row: the model itself, at level 0."""
    root = _Node()
    for module in bound.modules:
        for name in module.names:
            node = root
            for segment in name.split(".") if name else ():
                node = node.children.setdefault(segment, _Node())
            node.module = module
    _sign(root, {})
    return _Builder(bound).row(root, path="", label=bound.architecture, level=0, count=1, numbers="", first="")


def _sign(node: _Node, seen: dict[Signature, int]) -> int:
    """Number the kinds of subtrees: equal numbers are built alike, under the same rules."""
    below = tuple((segment, _sign(child, seen)) for segment, child in node.children.items())
    own = None if node.module is None else id(node.module)
    node.signature = seen.setdefault((own, below), len(seen))
    return node.signature


class _Builder:
    """Rows from nodes; keys are given in the order of the tree."""

    def __init__(self, bound: BoundPlan) -> None:
        self._bound, self._keys = bound, 0

    def row(self, node: _Node, *, path: str, label: str, level: int, count: int, numbers: str, first: str) -> Row:
        made = Row(
            key=self._keys,
            path=path,
            label=label,
            level=level,
            count=count,
            numbers=numbers,
            module=node.module,
            first=first,
            held=Held(),
        )
        self._keys += 1
        made.children = list(self._below(node, made))
        made.held = _sum([self._own(node.module, count), *(child.held for child in made.children)])
        return made

    def _below(self, node: _Node, above: Row) -> Iterator[Row]:
        for segment, child in node.children.items():
            path, first = _join(above.path, segment), _join(above.first, segment)
            groups = _groups(child)
            if child.module is None and groups:  # a list: its members are told, not the list
                for numbers in groups:
                    yield self.row(
                        child.children[numbers[0]],
                        path=f"{path}.*" if len(numbers) > 1 else f"{path}.{numbers[0]}",
                        label=f"{segment}.*" if len(numbers) > 1 else f"{segment}.{numbers[0]}",
                        level=above.level + 1,
                        count=above.count * len(numbers),
                        numbers=ranges(numbers),
                        first=f"{first}.{numbers[0]}",
                    )
            else:
                yield self.row(
                    child,
                    path=path,
                    label=segment,
                    level=above.level + 1,
                    count=above.count,
                    numbers="",
                    first=first,
                )

    def _own(self, module: BoundModule | None, count: int) -> Held:
        sums = {"model": 0, "cut": 0, "whole": 0}
        for tensor in () if module is None else module.tensors:
            if not tensor.buffer and tensor.tied_to is None:
                size = count * dtype_bytes(tensor.dtype)
                sums["model"] += size * math.prod(tensor.shape)
                kept = size * math.prod(self._bound.shard_shape(tensor))
                sums["cut" if tensor.placement.word == "S" else "whole"] += kept
        return Held(**sums)


def _join(path: str, segment: str) -> str:
    return f"{path}.{segment}" if path else segment


def _groups(node: _Node) -> list[list[str]]:
    """The numbers of a list's members, those built alike together; empty for what is no list."""
    if not node.children or not all(segment.isdecimal() for segment in node.children):
        return []
    groups: dict[int, list[str]] = {}
    for segment, child in node.children.items():
        groups.setdefault(child.signature, []).append(segment)
    return list(groups.values())


def ranges(numbers: Sequence[str]) -> str:
    """`0-2, 5, 7-9`."""
    runs: list[list[int]] = []
    for number in map(int, numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sum(held: Sequence[Held]) -> Held:
    return Held(
        model=sum(part.model for part in held),
        cut=sum(part.cut for part in held),
        whole=sum(part.whole for part in held),
    )
