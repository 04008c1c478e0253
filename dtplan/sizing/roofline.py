"""The time of a step, term by term: what the lanes of a schedule add up to, and what of it is waited for.

What is not in it: the host's time to launch, and stragglers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundPlan, dtype_bytes
from dtplan.planner.memory import MOMENTS, Held, Optimizer, Precision
from dtplan.sizing.gpus import Gpu
from dtplan.sizing.schedule import Links, Schedule, op_seconds, schedule
from dtplan.sizing.traced import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A part of the time of a step, and how it came about."""

    name: str
    seconds: float
    """All of it."""
    exposed: float
    """What of it adds to the step."""
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds of a step, and its terms, whose exposed parts add up to it."""

    seconds: float
    terms: tuple[Term, ...]


def estimate(
    traced: Traced,
    bound: BoundPlan,
    held: Held,
    links: Links,
    *,
    optimizer: Optimizer | None,
    precision: Precision,
    times: int = 1,
) -> Estimate:
    """The step of one rank, which runs forward and backward ``times`` times, then the optimizer, if there is one."""
    laid = schedule(traced, bound, precision, links)
    terms = [*_kernels(traced, links, times), *_tp(traced, links, times), *_fsdp(laid, links, times)]
    terms += [] if optimizer is None else [_optimizer(held, optimizer, precision, links.gpu)]
    kept = tuple(term for term in terms if term.seconds)
    return Estimate(seconds=sum(term.exposed for term in kept), terms=kept)


_KINDS = {
    "matrix": "matrix products",
    "fp8": "matrix products in FP8",
    "attention": "attention",
    "merged": "merged norms, activations, sums, copies, loss",
    "other": "norms, activations, sums, copies, loss",
}


def _kernels(traced: Traced, links: Links, times: int) -> Iterator[Term]:
    numbers, gpu = Counter(traced.units), links.gpu
    seconds: dict[str, float] = defaultdict(float)
    work: dict[str, int] = defaultdict(int)
    moved: dict[str, int] = defaultdict(int)
    for segment in (*traced.forward.values(), *traced.backward.values()):
        number = numbers.get(segment.name, 1) * times
        for op in segment.ops:
            seconds[op.kind] += op_seconds(op, links) * number
            work[op.kind] += op.flops * number
            moved[op.kind] += op.bytes * number
    told = {
        "matrix": f"{work['matrix'] / 1e12:.1f} TFLOP at {gpu.matrix / 1e12:.0f} TFLOP/s, or their bytes if slower",
        "fp8": f"{work['fp8'] / 1e12:.1f} TFLOP at {(gpu.fp8 or gpu.matrix) / 1e12:.0f} TFLOP/s",
        "attention": f"{work['attention'] / 1e12:.1f} TFLOP at {gpu.attention / 1e12:.0f} TFLOP/s forward, "
        f"{gpu.attention_backward / 1e12:.0f} backward",
        "merged": f"{moved['merged'] / 1e9:.1f} GB read and written at {gpu.merged_rate / 1e12:.1f} TB/s",
        "other": f"{moved['other'] / 1e9:.1f} GB read and written at {gpu.memory_rate / 1e12:.1f} TB/s",
    }
    for kind, name in _KINDS.items():
        yield Term(name=name, seconds=seconds[kind], exposed=seconds[kind], told=told[kind])


def _tp(traced: Traced, links: Links, times: int) -> Iterator[Term]:
    numbers = Counter(traced.units)
    seconds, calls, sent, n = 0.0, 0, 0.0, links.degrees["tp"]
    for segment in (*traced.forward.values(), *traced.backward.values()):
        number = numbers.get(segment.name, 1) * times
        for op in segment.ops:
            if op.kind == "collective":
                seconds += op_seconds(op, links) * number
                sent += (2 if op.name == "all_reduce" else 1) * (n - 1) / n * op.bytes * number
                calls += number
    told = f"{calls} calls, {sent / 1e9:.2f} GB sent a rank at {_link(links, 'tp')}; kernels wait for all of it"
    yield Term(name="collectives on tp", seconds=seconds, exposed=seconds, told=told)


def _fsdp(laid: Schedule, links: Links, times: int) -> Iterator[Term]:
    """What FSDP2 sends counts as far as kernels wait for it, or it goes on after them."""
    busy = sum(one.seconds for one in laid.slices if one.lane == "kernels")
    copies = [one for one in laid.slices if one.lane == "kernels" and one.segment is None]
    took, size = sum(one.seconds for one in copies), sum(one.bytes for one in copies)
    told = f"{times * size / 1e9:.1f} GB into and out of the buffers of collectives"
    yield Term(name="FSDP2's copies", seconds=times * took, exposed=times * took, told=told)
    sends = [one for one in laid.slices if one.lane == "fsdp"]
    seconds, waited = sum(one.seconds for one in sends), laid.seconds - busy
    rates = ", ".join(f"{axis} at {_link(links, axis)}" for axis in ("shard", "replicate") if links.degrees[axis] > 1)
    told = f"{times * len(sends)} calls, {time(times * seconds)} in all, the rest behind kernels; {rates}"
    yield Term(name="FSDP2's collectives", seconds=times * seconds, exposed=times * waited, told=told)


def _link(links: Links, axis: str) -> str:
    where = "NVLink" if links.within(axis) else "the network"
    return f"{links.rate(axis) / 1e9:.0f} GB/s of {where}"


def _optimizer(held: Held, optimizer: Optimizer, precision: Precision, gpu: Gpu) -> Term:
    """Reads parameters, gradients and moments, writes parameters and moments, as torch's fused kernels do."""
    numbers = held.gradients // dtype_bytes(precision.parameters)
    size = (3 + 2 * MOMENTS[optimizer]) * numbers * dtype_bytes(precision.parameters)
    seconds = size / gpu.memory_rate
    told = f"{size / 1e9:.1f} GB of parameters, gradients and moments, by fused kernels"
    return Term(name="optimizer", seconds=seconds, exposed=seconds, told=told)


def time(seconds: float) -> str:
    """Seconds, or milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
