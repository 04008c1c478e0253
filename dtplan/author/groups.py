"""The products of a block that belong together: the last ones of a branch, and those that they read from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dtplan.author.trace import Join, Product, Trace, is_stream
from dtplan.prove.edits import pattern_of


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """What is cut together if it is cut at all. Parameters go by their pattern: the experts of a list are one."""

    exits: tuple[str, ...]
    """Whose products are added to the stream."""
    products: tuple[Product, ...]
    root: str
    """The smallest module that was called and in which all of it happens."""

    @property
    def first(self) -> list[Product]:
        """Those that read no other product of the group."""
        own = {p.number for p in self.products}
        return [p for p in self.products if not p.last & own]

    @property
    def last(self) -> list[Product]:
        """Those that are added to the stream."""
        return [p for p in self.products if pattern_of(p.parameter) in self.exits]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """What is added to the stream in one place."""

    join: Join
    groups: tuple[Group, ...]
    direct: tuple[Product, ...]
    """Products of the stream that reach the sum themselves, as a router's do."""
    root: str
    """The smallest module that was called and in which all of it happens."""


def branches_of(trace: Trace) -> list[Branch]:
    """Every branch of a block, in the order in which they join."""
    number = {p.number: p for p in trace.products}
    found = []
    for join in trace.joins:
        ends = [number[n] for n in sorted(join.branch) if n > 0]
        direct = tuple(p for p in ends if is_stream(p.last) and len(ends) > 1)
        groups = tuple(_groups([p for p in ends if p not in direct], number, trace))
        every = [*direct, *(p for group in groups for p in group.products)]
        found.append(Branch(join=join, groups=groups, direct=direct, root=root_of(every, trace)))
    return found


def _groups(ends: Iterable[Product], number: Mapping[int, Product], trace: Trace) -> Iterable[Group]:
    """The last products and all before them; those that share a parameter, or a pattern of one, are one group."""
    merged: list[tuple[set[int], set[int], set[str]]] = []
    for end in ends:
        exits, members = {end.number}, {end.number, *_before(end, number)}
        names = {pattern_of(number[n].parameter) for n in members}
        for other in [one for one in merged if one[2] & names]:
            merged.remove(other)
            exits, members, names = exits | other[0], members | other[1], names | other[2]
        merged.append((exits, members, names))
    for exits, members, _ in merged:
        products = tuple(number[n] for n in sorted(members))
        yield Group(
            exits=tuple(dict.fromkeys(pattern_of(number[n].parameter) for n in sorted(exits))),
            products=products,
            root=root_of(products, trace),
        )


def _before(product: Product, number: Mapping[int, Product]) -> set[int]:
    seen: set[int] = set()
    ahead = [n for n in product.last if n > 0]
    while ahead:
        one = ahead.pop()
        if one not in seen:
            seen.add(one)
            ahead += [n for n in number[one].last if n > 0]
    return seen


def root_of(products: Collection[Product], trace: Trace) -> str:
    """The smallest module that was called once and was running in all of them."""
    stacks = [p.inside for p in products]
    common = [level[0] for level in zip(*stacks, strict=False) if len(set(level)) == 1]
    return next((name for name in reversed(common) if trace.times[name] == 1), "")
