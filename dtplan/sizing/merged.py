"""A traced step as a compiler would run it: which kernels become one, and what is in memory when.

A compiler (torch's inductor) merges everything but matrix products, attention and collectives. So a storage is held, or
it stands for the held storages that it is made of, and is computed where it is read. Held is what a product, attention,
a collective or code that is not compiled reads, what several kernels read, and what leaves backward. What besides its
own kernel only merged kernels of backward read is computed again there: torch's partitioner recomputes what can be
merged, and saves what backward needs in memory anyway.
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
    """Where a merged operator is: those in the same place are computed together."""

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
        begins = [at for at, moment in enumerate(self.moments) if moment.op is None]
        self.spans = list(zip(begins, [*begins[1:], len(self.moments)], strict=True))
        self.segment = [number for number, span in enumerate(self.spans) for _ in range(*span)]
        self.writers, self.readers = self._users("writes"), self._users("reads")
        self.places = list(self._earliest())
        self.held = [True] * len(self.lives)
        self._let_go()
        self.reads = list(self._reads())

    def segments(self) -> list[Segment]:
        """With merged kernels, and the bytes that are alive."""
        alive, ops = self._alive(), list(self._ops())
        found = []
        for old, (begin, end) in zip(self.flow.segments, self.spans, strict=True):
            peak = max(alive[at] + self.moments[at].inside for at in range(begin, end))
            own = [op for op in ops[begin:end] if op is not None]
            found.append(Segment(old.phase, old.name, alive[begin], alive[end], peak, own))
        return found

    def _users(self, how: str) -> dict[int, list[int]]:
        """Storage -> the moments that read or write it."""
        users: dict[int, list[int]] = defaultdict(list)
        for at, moment in enumerate(self.moments):
            views: tuple[View, ...] = getattr(moment, how)
            for view in views:
                users[view.storage].append(at)
        return users

    def _earliest(self) -> Iterator[Place | None]:
        """Where an operator can be first; None: it is not merged."""
        levels: dict[int, int] = defaultdict(int)
        for at, moment in enumerate(self.moments):
            if moment.op is None:  # a segment begins, and all that was made before is there
                levels.clear()
                yield None
                continue
            level = max((levels[view.storage] for view in moment.reads), default=0)
            merges = bool(self.regions[at]) and moment.op.kind == "other"
            yield Place(self.regions[at], self.segment[at], level) if merges else None
            for view in moment.writes:
                levels[view.storage] = max(levels[view.storage], level + (not merges))

    def _let_go(self) -> None:
        """Move what one kernel alone reads into that kernel, and hold it no longer; the last operator first."""
        for at in reversed(range(len(self.moments))):
            if self.places[at] is None:
                continue
            written = self.moments[at].writes
            into = {self._reader(view.storage, at) for view in written}
            if len(into) == 1 and None not in into:
                self.places[at] = into.pop()
                for view in written:
                    self.held[view.storage] = False

    def _reader(self, storage: int, maker: int) -> Place | None:
        """The kernel that reads a storage, besides those of backward that compute it again; None: it must be held."""
        own = self.places[maker]
        assert own is not None
        here: set[Place] = set()
        for at in (*self.readers[storage], *self.writers[storage]):
            user = self.places[at]
            if user is None or user.region != own.region:
                return None
            if user.segment == own.segment and at != maker:
                here.add(user)
            elif user.segment != own.segment and not self._is_backward(user.segment):
                return None
        return None if len(here) > 1 or self._leaves(storage, own.segment) else next(iter(here), own)

    def _is_backward(self, segment: int) -> bool:
        return self.flow.segments[segment].phase == "backward"

    def _leaves(self, storage: int, segment: int) -> bool:
        """Whether backward hands it out, as a gradient. What is left of forward is what autograd saved."""
        last = self.lives[storage].last
        return self._is_backward(segment) and (last is None or last >= self.spans[segment][1])

    def _reads(self) -> Iterator[set[View]]:
        """What every operator reads of what is held, in place of what is not."""
        made_of: dict[int, set[View]] = defaultdict(set)
        for moment in self.moments:
            reads: set[View] = set()
            for view in moment.reads:
                reads |= {view} if self.held[view.storage] else made_of[view.storage]
            for view in moment.writes:
                made_of[view.storage] |= reads
            yield reads

    def _ops(self) -> Iterator[Op | None]:
        """Every operator, a merged one with what it adds to its kernel's reads and writes; None: nothing.

        What one kernel writes is of one size: a sum over rows reads again what the kernel of each row has read.
        """
        moved: dict[tuple[Place, int, int], set[View]] = defaultdict(set)
        for at, (moment, place) in enumerate(zip(self.moments, self.places, strict=True)):
            if place is None or moment.op is None:
                yield moment.op
                continue
            size, written = 0, [view for view in moment.writes if self.held[view.storage]]
            for view in (*self.reads[at], *written) if written else ():
                views, whole = moved[place, written[0].bytes, view.storage], self.lives[view.storage].bytes
                size -= min(whole, sum(v.bytes for v in views))
                views.add(view)
                size += min(whole, sum(v.bytes for v in views))
            yield replace(moment.op, kind="merged", bytes=size) if size else None

    def _alive(self) -> list[int]:
        """Bytes at every moment, and after the last."""
        changes = [0] * (len(self.moments) + 2)
        used = {view.storage: at for at, reads in enumerate(self.reads) for view in reads}
        for storage, life in enumerate(self.lives):
            if self.held[storage]:
                changes[life.first] += life.size
                changes[self._last(storage, used.get(storage)) + 1] -= life.size
        return list(accumulate(changes))

    def _last(self, storage: int, used: int | None) -> int:
        """When a storage is freed: in compiled code after its last use, unless backward hands it out."""
        life = self.lives[storage]
        freed = len(self.moments) if life.last is None else life.last
        if used is None or self._leaves(storage, self.segment[life.first]):
            return freed
        return used if self.regions[life.first] else max(freed, used)
