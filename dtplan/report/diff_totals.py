"""Sums over two bound plans that differ: parameters, collectives of a step, bytes on the wire, floors."""

from __future__ import annotations

from collections.abc import Iterator

from dtplan.planner.bound import BoundPlan
from dtplan.planner.ledger import Ledger
from dtplan.report.diff import Difference, by_key
from dtplan.report.words import size

Words = dict[str, str | None]


def totals(before: tuple[BoundPlan, Ledger], after: tuple[BoundPlan, Ledger]) -> Iterator[Difference]:
    """The sums that differ."""
    sides = [_kept(bound) for bound, _ in (before, after)]
    yield from by_key("", *sides)
    calls, sent = ([table(*side) for side in (before, after)] for table in (_calls, _sent))
    for unit, (one, other) in (("", calls), ("bytes", sent)):
        words = str if not unit else size
        keys = sorted(one.keys() | other.keys())
        yield from by_key("", *({key: words(side.get(key, 0)) for key in keys} for side in (one, other)))
    yield from by_key("", *(_floors(book) for _, book in (before, after)))


def _kept(bound: BoundPlan) -> Words:
    whole, kept = bound.parameter_bytes()
    return {
        "parameters": size(whole),
        "parameters on rank 0": size(kept),
        "share of parameters cut on tp": f"{bound.sharded_share():.1%}",
    }


def _calls(_bound: BoundPlan, book: Ledger) -> dict[str, int]:
    calls: dict[str, int] = {}
    for entry in book.entries:
        key = f"{entry.kind.replace('_', '-')}s {entry.direction} on {entry.axis}"
        calls[key] = calls.get(key, 0) + entry.count
    return calls


def _sent(bound: BoundPlan, book: Ledger) -> dict[str, int]:
    sent: dict[str, int] = {}
    for entry in book.entries:
        key = f"sent by a rank on {entry.axis}"
        sent[key] = sent.get(key, 0) + entry.wire_bytes(bound.degrees[entry.axis])
    return sent


def _floors(book: Ledger) -> Words:
    return {
        f"collectives of {floor.layer} on tp": f"{floor.forward} forward + {floor.backward} backward "
        f"(at least {floor.floor_forward} + {floor.floor_backward})"
        for floor in book.floors
    }
