"""Parameters that hold parts of several tensors, or several parts of one: how they are put together, rank by rank.

A fused dim is cut part by part: every rank keeps its rows of each part, one part after another. So the dim of the
DTensor reads [part 0 of rank 0, part 1 of rank 0, ..., part 0 of rank 1, ...], an order that depends on the degree,
and that nobody outside may see: loading, saving, checkpoints and proofs go through the maps here. Rows that several
ranks keep (one kv head for many q heads) are in that dim once for each of them, so it may be longer than the tensor's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # bound plans are read without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows ``[start, start + size)`` of the tensor ``source``, cut evenly over the tp ranks, or over groups of them."""

    source: str
    """The tensor's full name in checkpoints."""
    start: int
    size: int
    copies: int = 1
    """Neighbouring ranks that keep the same rows; as many as there are: every rank keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``size`` rows of the stored dim from ``at`` on, which are the rows of ``source`` from ``start`` on."""

    at: int
    source: str
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The dim ``dim`` of one parameter at tp degree ``tp``; every other dim is that of the sources."""

    dim: int
    tp: int
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, sizes: Sequence[int], dim: int, tp: int, copies: Sequence[int] = ()) -> Stored:
        """The sections of one tensor, of ``sizes`` rows, one after another."""
        starts = itertools.accumulate(sizes, initial=0)
        parts = zip(starts, sizes, copies or [1] * len(sizes), strict=False)
        return cls(dim=dim, tp=tp, parts=tuple(Part(source=name, start=a, size=b, copies=c) for a, b, c in parts))

    @property
    def shared(self) -> bool:
        """Whether several ranks keep the same rows."""
        return any(part.copies > 1 for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows of the stored dim on every rank."""
        return sum(part.size * part.copies // self.tp for part in self.parts)

    def spans(self) -> list[tuple[int, int, int]]:
        """``(start, size, copies)`` of every part in a rank's rows."""
        sizes = [part.size * part.copies // self.tp for part in self.parts]
        starts = itertools.accumulate(sizes, initial=0)
        return [(a, b, part.copies) for a, b, part in zip(starts, sizes, self.parts, strict=False)]

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[Run]:
        """The stored rows ``[start, stop)``, all by default, as runs of the sources' rows, in order."""
        at = 0
        for rank in range(self.tp):
            for part in self.parts:
                size = part.size * part.copies // self.tp
                first = max(at, start)
                last = at + size if stop is None else min(at + size, stop)
                if first < last:
                    row = part.start + rank // part.copies * size + first - at
                    yield Run(at=first, source=part.source, start=row, size=last - first)
                at += size

    def lengths(self) -> dict[str, int]:
        """Source -> its length along the dim, in the order of the parts."""
        lengths: dict[str, int] = {}
        for part in self.parts:
            lengths[part.source] = max(lengths.get(part.source, 0), part.start + part.size)
        return lengths

    def split(self, whole: Tensor, rank: int = 0) -> dict[str, Tensor]:
        """The sources' tensors, copied out of the whole stored one; of what several ranks keep, what ``rank`` has."""
        found = {name: self._empty(whole, length) for name, length in self.lengths().items()}
        for run in sorted(self.runs(), key=lambda run: run.at // self.rows == rank):
            found[run.source].narrow(self.dim, run.start, run.size).copy_(whole.narrow(self.dim, run.at, run.size))
        return found

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """What ``rank`` keeps of the only source."""
        import torch

        runs = self.runs(rank * self.rows, (rank + 1) * self.rows)
        return torch.cat([whole.narrow(self.dim, run.start, run.size) for run in runs], self.dim)

    def join(self, sources: Mapping[str, Tensor]) -> Tensor:
        """The whole stored tensor; ``split`` undoes it."""
        import torch

        return torch.cat([sources[run.source].narrow(self.dim, run.start, run.size) for run in self.runs()], self.dim)

    def _empty(self, like: Tensor, length: int) -> Tensor:
        return like.new_empty([*like.shape[: self.dim], length, *like.shape[self.dim + 1 :]])
