"""An estimate of a step's time: each kernel at the rate that limits it, each collective at that of its link.

Kernels run one after another (a kernel takes the larger of its matrix work and its bytes, Williams et al. 2009), TP's
collectives wait for what they carry and are waited for, FSDP2's run beside the units' kernels. What is not in it: the
host's time to launch, stragglers, and what a compiler merges.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan, dtype_bytes
from dtplan.planner.ledger import OUTSIDE, Entry, Ledger
from dtplan.planner.memory import MOMENTS, ROOT, Held, Optimizer, Precision, units_of
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
    times: int
    """How often a step makes every call."""

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
        once = entry.wire_bytes(self.degrees[entry.axis]) / rate + entry.count * self.gpu.latency
        return self.times * once


def kernel_seconds(op: Op, gpu: Gpu) -> float:
    """The larger of an operator's matrix work and its traffic, each at its rate."""
    rates = {"fp8": gpu.fp8 or gpu.matrix, "attention": gpu.attention}
    rate = gpu.attention_backward if op.name.endswith("attention_backward") else rates.get(op.kind, gpu.matrix)
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
    times: int = 1,
) -> Estimate:
    """The step of one rank, which runs forward and backward ``times`` times; ``book`` is the ledger of one of them."""
    links = Links(gpu, dict(bound.degrees), per_host, times)
    terms = [*_kernels(traced, gpu, times)]
    terms += _tp(book, links, again=checkpointing)
    terms += _fsdp(traced, book, links)
    terms += _fsdp_copies(bound, precision, gpu, times)
    terms.append(_optimizer(held, optimizer, precision, gpu))
    kept = tuple(term for term in terms if term.seconds)
    return Estimate(seconds=sum(term.exposed for term in kept), terms=kept)


def segments_of(traced: Traced) -> Iterator[tuple[Segment, int]]:
    """Every stretch that was run, and how often the whole model has it."""
    numbers = Counter(traced.units)
    for segment in (*traced.forward.values(), *traced.backward.values()):
        yield segment, numbers.get(segment.name, 1)


def _kernels(traced: Traced, gpu: Gpu, times: int) -> Iterator[Term]:
    seconds: dict[str, float] = defaultdict(float)
    work: dict[str, int] = defaultdict(int)
    moved: dict[str, int] = defaultdict(int)
    for segment, number in segments_of(traced):
        for op in segment.ops:
            seconds[op.kind] += kernel_seconds(op, gpu) * number * times
            work[op.kind] += op.flops * number * times
            moved[op.kind] += op.bytes * number * times
    rates = {"matrix": ("matrix products", gpu.matrix), "fp8": ("matrix products in FP8", gpu.fp8 or gpu.matrix)}
    rates["attention"] = ("attention", gpu.attention)
    for kind, (name, rate) in rates.items():
        if kind in seconds:
            slower = (
                f", backward at {gpu.attention_backward / 1e12:.0f}"
                if kind == "attention"
                else ", or their bytes if slower"
            )
            told = f"{work[kind] / 1e12:.1f} TFLOP at {rate / 1e12:.0f} TFLOP/s{slower}"
            yield Term(name=name, seconds=seconds[kind], exposed=seconds[kind], told=told)
    if "other" in seconds:
        told = f"{moved['other'] / 1e9:.1f} GB read and written at {gpu.memory_rate / 1e12:.1f} TB/s"
        took = seconds["other"]
        yield Term(name="norms, activations, sums, copies, loss", seconds=took, exposed=took, told=told)


def _tp(book: Ledger, links: Links, *, again: bool) -> Iterator[Term]:
    entries = [entry for entry in book.entries if entry.axis == "tp"]
    if not entries:
        return
    repeated = [entry for entry in entries if again and entry.direction == "forward" and entry.layer != OUTSIDE]
    yield _collectives("collectives on tp", "tp", [*entries, *repeated], links, exposed=None)


def _collectives(name: str, axis: str, entries: Iterable[Entry], links: Links, exposed: float | None) -> Term:
    entries = list(entries)
    seconds = sum(links.seconds(entry) for entry in entries)
    sent = links.times * sum(entry.wire_bytes(links.degrees[axis]) for entry in entries)
    calls = links.times * sum(entry.count for entry in entries)
    within = links.within(axis)
    rate = links.gpu.link if within else links.gpu.network
    where = "NVLink" if within else "the network"
    told = f"{calls} calls, {sent / 1e9:.2f} GB sent a rank at {rate / 1e9:.0f} GB/s of {where}"
    if exposed is None:
        return Term(name=name, seconds=seconds, exposed=seconds, told=told + "; all of it is waited for")
    hidden = f"; {exposed * 1e3:.1f} ms of it are not hidden behind kernels"
    return Term(name=name, seconds=seconds, exposed=exposed, told=told + hidden)


def _fsdp(traced: Traced, book: Ledger, links: Links) -> Iterator[Term]:
    """Hidden as far as a unit's kernels last; the first gather and the last reduction have nothing to hide behind."""
    entries = [entry for entry in book.entries if entry.axis in ("shard", "replicate")]
    total = sum(links.seconds(entry) for entry in entries)
    if not total:
        return
    exposed = sum(links.seconds(entry) for entry in entries if entry.layer == OUTSIDE)
    units = Counter(traced.units)
    for phase in ("forward", "backward"):
        inside = [e for e in entries if e.layer != OUTSIDE and e.direction == phase]
        each = sum(links.seconds(entry) for entry in inside) / max(1, len(traced.units))
        segments: dict[str, Segment] = getattr(traced, phase)
        waits = {name: max(0.0, each - links.times * segment_seconds(segments[name], links.gpu)) for name in units}
        exposed += sum(waits[name] * number for name, number in units.items())
        exposed += each / (1 if phase == "forward" else 2)
    for axis in dict.fromkeys(entry.axis for entry in entries):
        own = [entry for entry in entries if entry.axis == axis]
        share = sum(links.seconds(entry) for entry in own) / total
        yield _collectives(f"FSDP2 on {axis}", axis, own, links, exposed=min(exposed, total) * share)


def _fsdp_copies(bound: BoundPlan, precision: Precision, gpu: Gpu, times: int) -> Iterator[Term]:
    """What FSDP2 gathers is copied out of a buffer, what it reduces into one; each is read and written."""
    if bound.degrees["shard"] * bound.degrees["replicate"] == 1 and not precision.mixed:
        return
    again = bound.fsdp["reshard_after_forward"] is not False
    size = 0
    for name, unit in units_of(bound, precision).items():
        gathers = 2 if again and name != ROOT else 1
        size += gathers * 2 * unit.gathered + unit.gradients + unit.reduced
    told = (
        f"{times * size / 1e9:.1f} GB out of and into the buffers of collectives at {gpu.memory_rate / 1e12:.1f} TB/s"
    )
    seconds = times * size / gpu.memory_rate
    yield Term(name="FSDP2's copies", seconds=seconds, exposed=seconds, told=told)


def _optimizer(held: Held, optimizer: Optimizer, precision: Precision, gpu: Gpu) -> Term:
    """Reads parameters, gradients and moments, writes parameters and moments; torch's fused kernels."""
    numbers = held.gradients // dtype_bytes(precision.parameters)
    size = (3 + 2 * MOMENTS[optimizer]) * numbers * dtype_bytes(precision.parameters)
    seconds = size / gpu.memory_rate
    told = f"{size / 1e9:.1f} GB of parameters, gradients and moments at {gpu.memory_rate / 1e12:.1f} TB/s"
    return Term(name="optimizer", seconds=seconds, exposed=seconds, told=told)
