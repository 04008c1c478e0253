"""A watched step with its data flow: which storages every operator reads and writes, and when each is freed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from dtplan.sizing.watch import Op, Watch, bytes_of, local_tensors


class View(NamedTuple):
    """What an operator sees of a storage, which has a running number: its address is used again once it is freed."""

    storage: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Moment:
    """An operator, or where a segment begins (``op`` is None)."""

    op: Op | None = None
    reads: tuple[View, ...] = ()
    writes: tuple[View, ...] = ()
    inside: int = 0
    """Bytes that the kernel allocates for itself."""


@dataclass(slots=True)
class Life:
    """Of a storage: its bytes, and its first and last moment; None: it outlives them."""

    bytes: int
    size: int
    """As the allocator rounds it; 0, if it was there before."""
    first: int
    last: int | None = None


class Flow(Watch):
    """Follows the data as well. ``moments`` count the time."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.moments: list[Moment] = []
        self.lives: list[Life] = []
        self._numbers: dict[int, int] = {}
        super().__init__(known)

    def begin(self, phase: str, name: str) -> None:
        """A new segment."""
        super().begin(phase, name)
        self.moments.append(Moment())

    def ran(self, op: Op, read: list[Tensor], written: list[Tensor], inside: int) -> None:
        """A moment passed."""
        self.moments.append(Moment(op, tuple(self._views(read)), tuple(self._views(written)), inside))

    def within(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose operators are a part of ``name``; it has no gradient of its own."""

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            self._entered(name, None, args)
            try:
                return function(*args)
            finally:
                self._inside.pop()

        return run

    def _follow(self, tensor: Tensor, *, counted: bool = True) -> bool:
        fresh = super()._follow(tensor, counted=counted)
        if fresh:
            (local,) = local_tensors([tensor])
            storage = local.untyped_storage()
            self._numbers[storage._cdata] = len(self.lives)
            self.lives.append(Life(storage.nbytes(), self._held[storage._cdata], first=len(self.moments)))
        return fresh

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self.lives[self._numbers.pop(key)].last = len(self.moments) - 1

    def _views(self, tensors: Iterable[Tensor]) -> Iterator[View]:
        for tensor in local_tensors(tensors):
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:  # None: on another device
                yield View(number, int(tensor.storage_offset()), bytes_of(tensor))
