"""Collective failures: every rank meets, and every rank raises the same error.

A rank that fails alone inside a phase must not leave the others waiting in the next collective. So a phase
runs to its end on every rank, failures are kept aside, and ``agree`` then raises one text everywhere.

Private torch API used here and nowhere else in this package: ``distributed_c10d._get_default_store``, tried
on torch 2.11 to 2.14.1; the public barrier with a timeout works on gloo only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from traceback import format_exception_only
from types import TracebackType
from typing import TypeVar

from torch.distributed.distributed_c10d import _get_default_store

from dtplan._errors import WeightsError
from dtplan.planner.agreement import gather_objects, rank_and_world

__all__ = ["Attempt", "agree", "agreed", "gather_objects", "meet", "rank_and_world"]

T = TypeVar("T")


class Attempt(AbstractContextManager["Attempt"]):
    """Keeps the first exception of its blocks, so that the rank still enters the next collective."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


def agree(error: Exception | None) -> None:
    """Raises the same WeightsError on all ranks when any rank brings an ``error``.

    The text says which ranks failed when not all did. Collective over the default group; without a group the
    error alone counts.
    """
    failures = gather_objects(_text(error))
    by_text: dict[str, list[int]] = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            by_text.setdefault(failure, []).append(rank)
    if by_text:
        world = len(failures)
        lines = (
            failure if len(ranks) == world else f"{failure} [on {_ranks(ranks)} of {world}]"
            for failure, ranks in by_text.items()
        )
        raise WeightsError("\n".join(lines)) from error


def _text(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, WeightsError) else format_exception_only(error)[-1].strip()


def agreed(step: Callable[[], T]) -> T:
    """The result of ``step`` when it succeeded on every rank; else the same WeightsError on all of them."""
    attempt = Attempt()
    with attempt:
        result = step()
    agree(attempt.error)
    return result


def meet(call: str, seconds: float) -> None:
    """Waits until every rank of the default group has made ``call``, at most ``seconds``.

    The meeting is on the job's key-value store, so it works for any backend and needs no device. Raises
    WeightsError on the ranks that came when others did not.
    """
    rank, world = rank_and_world()
    if world == 1:
        return
    store = _get_default_store()
    turn_key = f"dtplan/{call}/{rank}"
    turn = store.add(turn_key, 1)
    here = [f"dtplan/{call}/{turn}/{other}" for other in range(world)]
    store.set(here[rank], "here")
    try:
        store.wait(here, timedelta(seconds=seconds))
    except RuntimeError as error:  # a file store raises no DistStoreError, which is a RuntimeError too
        absent = [other for other in range(world) if not store.check([here[other]])]
        if not absent:
            return
        # Undone, so that the ranks can still meet in a later call.
        store.add(turn_key, -1)
        store.delete_key(here[rank])
        raise WeightsError(
            f"{call} is collective: all {world} ranks must call it, and {_ranks(absent)} did not within "
            f"{seconds:g} s; call it on every rank, not under `if rank == 0`"
        ) from error


def _ranks(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
