"""When what happens in a step of one rank: kernels, collectives on tp, FSDP2's collectives, each on a lane of its own.

Kernels run one after another. A collective on tp waits for the kernels before it, and those after it wait for it. FSDP2
gathers a unit while the unit before it is computed, and reduces a unit's gradients beside the next unit; kernels wait
for what is not there yet (torch 2.11 to 2.13: ``FSDPParamGroup``). All of it is an estimate from rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from dtplan.planner.bound import BoundPlan
from dtplan.planner.memory import ROOT, Precision, UnitBytes, units_of
from dtplan.sizing.gpus import Gpu
from dtplan.sizing.traced import Traced
from dtplan.sizing.watch import Op, Segment

Lane = Literal["kernels", "tp", "fsdp"]
TOLD = {"before": "embedding", "after": "head and loss"}


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of a lane, in seconds."""

    lane: Lane
    name: str
    start: float
    seconds: float
    segment: Segment | None = None
    """What is computed, with collectives on tp in between; None for FSDP2's own work."""
    bytes: int = 0

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.seconds


@dataclass(slots=True)
class Schedule:
    """The slices of one forward and backward, by the time at which they begin, lane by lane."""

    slices: list[Slice] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """When the last lane is done."""
        return max((one.end for one in self.slices), default=0.0)


@dataclass(frozen=True, slots=True)
class Links:
    """How fast the axes of a mesh are: tp is innermost, then shard, then replicate; ``per_host`` ranks share a host."""

    gpu: Gpu
    degrees: dict[str, int]
    per_host: int

    def within(self, axis: str) -> bool:
        """Whether all ranks of the axis are in one host."""
        return self._inner(axis) * self.degrees[axis] <= self.per_host

    def rate(self, axis: str) -> float:
        """Bytes/s that a rank sends in a ring. Over hosts, each of its ranks in a host brings an adapter of its own."""
        if self.within(axis):
            return self.gpu.link
        here = max(1, self.per_host // self._inner(axis))
        return min(self.gpu.link, self.gpu.network * here)

    def seconds(self, kind: str, size: int, axis: str) -> float:
        """Of one collective on ``size`` bytes; a ring sends each byte (n-1)/n times, for an all-reduce twice."""
        n = self.degrees[axis]
        if n == 1 or size == 0:
            return 0.0
        return self.gpu.latency + (2 if kind.startswith("all_reduce") else 1) * (n - 1) / n * size / self.rate(axis)

    def _inner(self, axis: str) -> int:
        inner = {"tp": (), "shard": ("tp",), "replicate": ("tp", "shard")}[axis]
        size = 1
        for name in inner:
            size *= self.degrees[name]
        return size


def op_seconds(op: Op, links: Links) -> float:
    """A kernel takes the larger of its matrix work and its traffic, each at its rate (Williams et al. 2009)."""
    gpu = links.gpu
    if op.kind == "collective":
        return links.seconds(op.name, op.bytes, "tp")
    rates = {"fp8": gpu.fp8 or gpu.matrix, "attention": gpu.attention}
    rate = gpu.attention_backward if op.name.endswith("attention_backward") else rates.get(op.kind, gpu.matrix)
    memory_rate = gpu.merged_rate if op.kind == "merged" else gpu.memory_rate
    return max(op.flops / rate, op.bytes / memory_rate, gpu.kernel if op.bytes else 0.0)


def schedule(traced: Traced, bound: BoundPlan, precision: Precision, links: Links) -> Schedule:
    """One forward and backward of the whole model."""
    return _Scheduler(traced, bound, precision, links).run()


class _Scheduler:
    def __init__(self, traced: Traced, bound: BoundPlan, precision: Precision, links: Links) -> None:
        self.traced, self.links = traced, links
        self.names = bound.fsdp_units
        self.on = bound.degrees["shard"] * bound.degrees["replicate"] > 1 or precision.mixed
        self.again = bound.fsdp["reshard_after_forward"] is not False
        self.units = units_of(bound, precision) if self.on else {}
        self.seconds = {id(s): sum(op_seconds(op, links) for op in s.ops) for s in self._segments()}
        self.found = Schedule()
        self.now = 0.0  # of the kernels
        self.free = 0.0  # when FSDP2's lane is
        self.there: dict[str, float] = {}  # unit -> when it is gathered

    def run(self) -> Schedule:
        """Forward, then backward."""
        units = list(zip(self.names, self.traced.units, strict=True))
        self._gather(ROOT)
        self._need(ROOT)
        self._gather(units[0][0]) if units else None
        self._compute("forward", "before", "")
        for index, (name, unit) in enumerate(units):
            self._need(name)
            self._gather(units[index + 1][0]) if index + 1 < len(units) else None
            self._compute("forward", unit, name)
        self._gather(units[-1][0]) if units and self.again else None
        self._compute("forward", "after", "")
        self._compute("backward", "after", "")
        for index in reversed(range(len(units))):
            name, unit = units[index]
            if self.again:
                self._need(name)
                self._gather(units[index - 1][0]) if index else None
            self._compute("backward", unit, name)
            self._reduce(name)
        if "before" in self.traced.backward:
            self._compute("backward", "before", "")
        self._reduce(ROOT)
        return self.found

    def _segments(self) -> Iterator[Segment]:
        yield from self.traced.forward.values()
        yield from self.traced.backward.values()

    def _compute(self, phase: str, segment: str, name: str) -> None:
        found: Segment = getattr(self.traced, phase)[segment]
        seconds = self.seconds[id(found)]
        told = f"{TOLD.get(segment, name)} {phase}"
        self.found.slices.append(Slice("kernels", told, self.now, seconds, segment=found))
        self.now += seconds

    def _gather(self, name: str) -> None:
        """Begin to gather a unit, as soon as the lane is free."""
        if self.on:
            size = self.units[name].gathered
            self._send(f"all-gather {name or 'root'}", self.links.seconds("all_gather", size, "shard"), size)
            self.there[name] = self.free

    def _need(self, name: str) -> None:
        """Wait until a unit is gathered, and copy it out of the buffer."""
        if self.on:
            self.now = max(self.now, self.there[name])
            self._copy(f"copy out {name or 'root'}", 2 * self.units[name].gathered)

    def _reduce(self, name: str) -> None:
        """Copy a unit's gradients into the buffer, and begin to reduce them."""
        if not self.on:
            return
        unit: UnitBytes = self.units[name]
        self._copy(f"copy in {name or 'root'}", unit.gradients + unit.reduced)
        scattered = self.links.seconds("reduce_scatter", unit.reduced, "shard")
        self._send(f"reduce-scatter {name or 'root'}", scattered, unit.reduced)
        part = unit.reduced // self.links.degrees["shard"]
        self._send(f"all-reduce {name or 'root'}", self.links.seconds("all_reduce", part, "replicate"), part)

    def _copy(self, name: str, size: int) -> None:
        seconds = size / self.links.gpu.memory_rate
        self.found.slices.append(Slice("kernels", name, self.now, seconds, bytes=size))
        self.now += seconds

    def _send(self, name: str, seconds: float, size: int) -> None:
        if seconds:
            start = max(self.now, self.free)
            self.found.slices.append(Slice("fsdp", name, start, seconds, bytes=size))
            self.free = start + seconds
        else:
            self.free = max(self.now, self.free)
