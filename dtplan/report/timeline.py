"""A step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing: an estimate, not a measurement.

Lanes of each rank: kernels, collectives on tp, FSDP2's collectives. Units are slices, modules slices within.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from dtplan.sizing.fit import Ask, Variant
from dtplan.sizing.schedule import TOLD, Lane, Links, Slice, op_seconds, schedule
from dtplan.sizing.watch import Op

_LANES: dict[Lane, tuple[int, str]] = {
    "kernels": (0, "kernels"),
    "tp": (1, "collectives on tp"),
    "fsdp": (2, "FSDP2's collectives"),
}
_NOTE = "an estimate from rates by dtplan fit: nothing here was measured"


def chrome_trace(variant: Variant, ask: Ask, *, ranks: int | None = None) -> dict[str, Any]:
    """One forward and backward and the optimizer, in microseconds; the ranks of one tp group, which all do the same.

    With micro-batches it is one of them. ``ranks``: how many to draw; None: the tp group.
    """
    links = Links(ask.gpu, dict(variant.bound.degrees), ask.per_host)
    laid = schedule(variant.traced, variant.bound, ask.precision, links)
    slices = [event for one in laid.slices for event in _events(one, links)]
    optimizer = next((term for term in variant.estimate.terms if term.name == "optimizer"), None)
    if optimizer is not None:
        slices.append(_slice("kernels", "optimizer step", laid.seconds, optimizer.seconds, {"what": optimizer.told}))
    number = ranks or links.degrees["tp"]
    events = [event for rank in range(number) for event in (*_names(rank, links), *_on(rank, slices))]
    degrees = ", ".join(f"{axis} {size}" for axis, size in links.degrees.items())
    about = {"note": _NOTE, "model": variant.bound.architecture, "degrees": degrees, "gpu": ask.gpu.name}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about | {"switches": str(variant.switches)}}


def _names(rank: int, links: Links) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} (estimated)"}}
    for lane, name in _LANES.values():
        if lane == 0 or links.degrees["tp" if lane == 1 else "shard"] > 1:
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}


def _on(rank: int, slices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return ({**event, "pid": rank} for event in slices)


def _events(one: Slice, links: Links) -> Iterator[dict[str, Any]]:
    """A slice; of a unit also what its modules do, with collectives on their own lane."""
    details = {"GB": round(one.bytes / 1e9, 4)} if one.bytes else {}
    yield _slice(one.lane, one.name, one.start, one.seconds, details)
    if one.segment is None:
        return
    ran, now = one.segment.name, one.start
    name = one.name.rpartition(" ")[0]
    for (module, kind), group in itertools.groupby(
        one.segment.ops, key=lambda op: (op.module, op.kind == "collective")
    ):
        ops = list(group)
        seconds = sum(op_seconds(op, links) for op in ops)
        told = _place(module, ran, name)
        if kind:
            yield _slice("tp", f"{', '.join(op.name for op in ops)} {told}", now, seconds, _moved(ops))
        else:
            yield _slice("kernels", told, now, seconds, _computed(ops))
        now += seconds


def _place(module: str, ran: str, name: str) -> str:
    """The module of the whole model for which the one that was run stands."""
    if ran in TOLD:
        return module or name
    return name + module.removeprefix(ran) if module.startswith(ran) else f"{name} (sums of gradients and residuals)"


def _slice(lane: Lane, name: str, start: float, seconds: float, details: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 3), "dur": round(seconds * 1e6, 3)}
    return {"ph": "X", "cat": lane, "name": name, "tid": _LANES[lane][0], **times, "args": details}


def _moved(ops: Iterable[Op]) -> dict[str, Any]:
    return {"MB": round(sum(op.bytes for op in ops) / 1e6, 3)}


def _computed(ops: list[Op]) -> dict[str, Any]:
    flops, size = sum(op.flops for op in ops), sum(op.bytes for op in ops)
    kernels = ", ".join(dict.fromkeys(op.name for op in ops))
    return {"kernels": kernels, "number": len(ops), "GFLOP": round(flops / 1e9, 3), "MB": round(size / 1e6, 3)}
