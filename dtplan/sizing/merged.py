"""A traced step as a compiler would run it: which kernels become one, and what is in memory when.

A compiler (torch's inductor) merges everything but matrix products, attention and collectives. What only merged kernels
of one place read is never in memory: it is computed where it is read, in backward as well (torch's partitioner
recomputes what it can merge, and keeps what a product or attention reads in backward). So there is one rule: a storage
is held, or it stands for the held storages that it is made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from dtplan.sizing.flow import Flow, View
from dtplan.sizing.watch import Op, Segment


class Place(NamedTuple):
    """Where a merged operator is: those in the same place are one kernel."""

    region: str
    segment: int
    level: int
    """Operators that are not merged, one after another, for whose results it waits within the segment."""


def merged(flow: Flow, region: Callable[[str], str]) -> list[Segment]:
    """The segments of ``flow`` where a compiler has merged kernels; ``region``: module -> what is compiled, or ''."""
    return _Merging(flow, region).segments()


class _Merging:
    def __init__(self, flow: Flow, region: Callable[[str], str]) -> None:
        self.flow, self.moments, self.lives = flow, flow.moments, flow.lives
        self.regions = [region(m.op.module) if m.op else "" for m in self.moments]
        self.begins = [at for at, m in enumerate(self.moments) if m.op is None]
        self.ends = [*self.begins[1:], len(self.moments)]
        self.segment = [number for number, (a, b) in enumerate(self._spans()) for _ in range(a, b)]
        self.writers, self.readers = self._users("writes"), self._users("reads")
        self.places = self._earliest()
        self.held = [True] * len(self.lives)
        self._let_go()
        self.reads = list(self._reads())

    def segments(self) -> list[Segment]:
        """With merged kernels, and the bytes that are alive."""
        alive = self._alive()
        ops = list(self._ops())
        found = []
        for old, (begin, end) in zip(self.flow.segments, self._spans(), strict=True):
            peak = max(alive[at] + self.moments[at].inside for at in range(begin, end))
            made = [op for op in ops[begin:end] if op is not None]
            found.append(Segment(old.phase, old.name, alive[begin], alive[end], peak, made))
        return found

    def _spans(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.begins, self.ends, strict=True)

    def _users(self, how: str) -> dict[int, list[int]]:
        """Storage -> the moments that read or write it."""
        users: dict[int, list[int]] = defaultdict(list)
        for at, moment in enumerate(self.moments):
            views: tuple[View, ...] = getattr(moment, how)
            for view in views:
                users[view.storage].append(at)
        return users

    def _earliest(self) -> list[Place | None]:
        """Of every moment, as early as it can be; None: it is not merged."""
        levels: dict[int, int] = {}
        places: list[Place | None] = []
        for at, moment in enumerate(self.moments):
            if moment.op is None:
                levels.clear()
                places.append(None)
                continue
            level = max((levels.get(view.storage, 0) for view in moment.reads), default=0)
            merges = bool(self.regions[at]) and moment.op.kind == "other"
            places.append(Place(self.regions[at], self.segment[at], level) if merges else None)
            for view in moment.writes:
                levels[view.storage] = max(levels.get(view.storage, 0), level + (not merges))
        return places

    def _let_go(self) -> None:
        """Do not hold what one kernel computes as it reads it; it takes the place of that kernel."""
        for at in reversed(range(len(self.moments))):
            if self.places[at] is None:
                continue
            into = {self._reader(view.storage, at) for view in self.moments[at].writes}
            if len(into) == 1 and None not in into:
                self.places[at] = into.pop()
                for view in self.moments[at].writes:
                    self.held[view.storage] = False

    def _reader(self, storage: int, maker: int) -> Place | None:
        """The one kernel that reads a storage, besides those of backward, which compute it again; None: it is held."""
        own = self.places[maker]
        assert own is not None
        readers = {self.places[at] for at in (*self.readers[storage], *self.writers[storage]) if at != maker}
        backward = self.flow.segments[own.segment].phase == "backward"
        if any(reader is None or reader.region != own.region for reader in readers):
            return None
        here = {reader for reader in readers if reader.segment == own.segment}
        if len(here) > 1 or (backward and self._outlives(storage, own.segment)):
            return None
        return next(iter(here), own)

    def _outlives(self, storage: int, segment: int) -> bool:
        last = self.lives[storage].last
        return last is None or last >= self.ends[segment]

    def _reads(self) -> Iterator[set[View]]:
        """What every operator reads of what is held, in place of what is not."""
        made_of: dict[int, set[View]] = defaultdict(set)
        for moment in self.moments:
            reads: set[View] = set()
            for view in moment.reads:
                reads |= {view} if self.held[view.storage] else made_of[view.storage]
            for view in moment.writes:
                if not self.held[view.storage]:
                    made_of[view.storage] |= reads
            yield reads

    def _ops(self) -> Iterator[Op | None]:
        """Every operator, a merged one with what it adds to its kernel's reads and writes; None: nothing."""
        moved: dict[tuple[Place, int], set[View]] = defaultdict(set)
        for at, (moment, place) in enumerate(zip(self.moments, self.places, strict=True)):
            if place is None or moment.op is None:
                yield moment.op
                continue
            size, written = 0, [view for view in moment.writes if self.held[view.storage]]
            for view in (*self._from_outside(at, place), *written) if written else ():
                views, whole = moved[place, view.storage], self.lives[view.storage].bytes
                size -= min(whole, sum(v.bytes for v in views))
                views.add(view)
                size += min(whole, sum(v.bytes for v in views))
            yield replace(moment.op, kind="merged", bytes=size) if size else None

    def _from_outside(self, at: int, place: Place) -> Iterator[View]:
        """What an operator reads that its own kernel does not make."""
        for view in self.reads[at]:
            if all(self.places[by] != place for by in self.writers[view.storage]):
                yield view

    def _alive(self) -> list[int]:
        """Bytes at every moment, and after the last."""
        changes = [0] * (len(self.moments) + 2)
        used = {view.storage: at for at, reads in enumerate(self.reads) for view in reads}
        for storage, life in enumerate(self.lives):
            if life.size and self.held[storage]:
                changes[life.first] += life.size
                changes[self._last(storage, used.get(storage)) + 1] -= life.size
        return list(accumulate(changes))

    def _last(self, storage: int, used: int | None) -> int:
        """When a storage is freed: in compiled code after its last use, unless backward hands it out."""
        life = self.lives[storage]
        freed = len(self.moments) if life.last is None else life.last
        if not self.regions[life.first]:
            return max(freed, used or 0)
        segment = self.segment[life.first]
        backward = self.flow.segments[segment].phase == "backward"
        if used is None or (backward and self._outlives(storage, segment)):
            return freed
        return used
