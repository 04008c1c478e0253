"""An estimate of a step's time: each kernel at the rate that limits it, each collective at that of its link.

Kernels run one after another (a kernel takes the larger of its matrix work and its bytes, Williams et al. 2009), TP's
collectives wait for what they carry and are waited for, FSDP2's run beside the units' kernels. What is not in it: the
host's time to launch, stragglers, and what a compiler merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan, dtype_bytes
from dtplan.planner.ledger import OUTSIDE, Entry, Ledger
from dtplan.planner.memory import MOMENTS, Held, Optimizer, Precision
from dtplan.sizing.gpus import Gpu
from dtplan.sizing.traced import Traced
from dtplan.sizing.watch import Op, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the time of a step, in seconds, how it came about, and whether it adds to the step."""

    name: str
    seconds: float
    told: str
    exposed: float
    """Seconds that are not hidden behind others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of a step, and its terms."""

    seconds: float
    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Links:
    """Which axes of the mesh stay within a host: tp is innermost, then shard, then replicate."""

    gpu: Gpu
    degrees: dict[str, int]
    per_host: int

    def within(self, axis: str) -> bool:
        """Whether all ranks of the axis are in one host."""
        reach = 1
        for name in ("tp", "shard", "replicate"):
            reach *= self.degrees[name]
            if name == axis:
                return reach <= self.per_host
        raise KeyError(axis)

    def seconds(self, entry: Entry) -> float:
        """Of all calls of an entry."""
        rate = self.gpu.link if self.within(entry.axis) else self.gpu.network
        return entry.wire_bytes(self.degrees[entry.axis]) / rate + entry.count * self.gpu.latency


def kernel_seconds(op: Op, gpu: Gpu) -> float:
    """The larger of an operator's matrix work and its traffic, each at its rate."""
    rate = {"matrix": gpu.matrix, "fp8": gpu.fp8 or gpu.matrix, "attention": gpu.attention}.get(op.kind, gpu.matrix)
    return max(op.flops / rate, op.bytes / gpu.memory_rate)


def segment_seconds(segment: Segment, gpu: Gpu) -> float:
    """Of a stretch of a step."""
    return sum(kernel_seconds(op, gpu) for op in segment.ops)


def estimate(
    traced: Traced,
    bound: BoundPlan,
    book: Ledger,
    held: Held,
    *,
    gpu: Gpu,
    per_host: int,
    optimizer: Optimizer,
    precision: Precision,
    checkpointing: bool,
) -> Estimate:
    """The step of one rank. ``book`` is the ledger of what one data-parallel rank computes."""
    links = Links(gpu, dict(bound.degrees), per_host)
    terms = [*_kernels(traced, gpu)]
    terms += _tp(book, links, again=checkpointing)
    terms += _fsdp(traced, bound, book, links)
    terms.append(_optimizer(held, optimizer, precision, gpu))
    kept = tuple(term for term in terms if term.seconds)
    return Estimate(seconds=sum(term.exposed for term in kept), terms=kept)


def segments_of(traced: Traced) -> Iterator[Segment]:
    """Every stretch of the whole model's step, in order."""
    yield traced.forward["before"]
    yield from (traced.forward[name] for name in traced.units)
    yield traced.forward["after"]
    yield traced.backward["after"]
    yield from (traced.backward[name] for name in reversed(traced.units))
    if "before" in traced.backward:
        yield traced.backward["before"]


def _kernels(traced: Traced, gpu: Gpu) -> Iterator[Term]:
    seconds: dict[str, float] = {}
    work: dict[str, int] = {}
    moved: dict[str, int] = {}
    for segment in segments_of(traced):
        for op in segment.ops:
            seconds[op.kind] = seconds.get(op.kind, 0) + kernel_seconds(op, gpu)
            work[op.kind] = work.get(op.kind, 0) + op.flops
            moved[op.kind] = moved.get(op.kind, 0) + op.bytes
    rates = {"matrix": ("matrix products", gpu.matrix), "fp8": ("matrix products in FP8", gpu.fp8 or gpu.matrix)}
    rates["attention"] = ("attention", gpu.attention)
    for kind, (name, rate) in rates.items():
        if kind in seconds:
            told = f"{work[kind] / 1e12:.1f} TFLOP at {rate / 1e12:.0f} TFLOP/s, or their bytes where that is slower"
            yield Term(name=name, seconds=seconds[kind], exposed=seconds[kind], told=told)
    if "other" in seconds:
        told = f"{moved['other'] / 1e9:.1f} GB read and written at {gpu.memory_rate / 1e12:.1f} TB/s"
        yield Term(name="norms, activations, sums, copies, loss", seconds=seconds["other"], exposed=seconds["other"], told=told)


def _tp(book: Ledger, links: Links, *, again: bool) -> Iterator[Term]:
    entries = [entry for entry in book.entries if entry.axis == "tp"]
    if not entries:
        return
    repeated = [entry for entry in entries if again and entry.direction == "forward" and entry.layer != OUTSIDE]
    yield _collectives("collectives on tp", "tp", [*entries, *repeated], links, exposed=None)


def _collectives(name: str, axis: str, entries: Iterable[Entry], links: Links, exposed: float | None) -> Term:
    entries = list(entries)
    seconds = sum(links.seconds(entry) for entry in entries)
    sent = sum(entry.wire_bytes(links.degrees[axis]) for entry in entries)
    calls = sum(entry.count for entry in entries)
    within = links.within(axis)
    rate = links.gpu.link if within else links.gpu.network
    where = "NVLink" if within else "the network"
    told = f"{calls} calls, {sent / 1e9:.2f} GB sent a rank at {rate / 1e9:.0f} GB/s of {where}"
    if exposed is None:
        return Term(name=name, seconds=seconds, exposed=seconds, told=told + "; all of it is waited for")
    hidden = f"; {exposed * 1e3:.1f} ms of it are not hidden behind kernels"
    return Term(name=name, seconds=seconds, exposed=exposed, told=told + hidden)


def _fsdp(traced: Traced, bound: BoundPlan, book: Ledger, links: Links) -> Iterator[Term]:
    """Hidden as far as a unit's kernels last; the first gather and the last reduction have nothing to hide behind."""
    entries = [entry for entry in book.entries if entry.axis in ("shard", "replicate")]
    if not entries:
        return
    outside = {"forward": 0.0, "backward": 0.0}
    inside = {"forward": 0.0, "backward": 0.0}
    for entry in entries:
        into = outside if entry.layer == OUTSIDE else inside
        into[entry.direction] += links.seconds(entry)
    exposed = sum(outside.values())
    number = max(1, len(traced.units))
    for phase, total in inside.items():
        each = total / number
        segments: dict[str, Segment] = getattr(traced, phase)
        exposed += each / (1 if phase == "forward" else 2)
        exposed += sum(max(0.0, each - segment_seconds(segments[name], links.gpu)) for name in traced.units[1:])
    total = sum(outside.values()) + sum(inside.values())
    shares = [axis for axis in ("shard", "replicate") if any(entry.axis == axis for entry in entries)]
    for axis in shares:
        own = [entry for entry in entries if entry.axis == axis]
        seconds = sum(links.seconds(entry) for entry in own)
        yield _collectives(f"FSDP2 on {axis}", axis, own, links, exposed=exposed * seconds / total)


def _optimizer(held: Held, optimizer: Optimizer, precision: Precision, gpu: Gpu) -> Term:
    """Reads parameters, gradients and moments, writes parameters and moments."""
    numbers = held.gradients // dtype_bytes(precision.parameters)
    size = (3 + 2 * MOMENTS[optimizer]) * numbers * dtype_bytes(precision.parameters)
    seconds = size / gpu.memory_rate
    told = f"{size / 1e9:.1f} GB of parameters, gradients and moments at {gpu.memory_rate / 1e12:.1f} TB/s"
    return Term(name="optimizer", seconds=seconds, exposed=seconds, told=told)
