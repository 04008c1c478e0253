"""What the first screen says: a sentence, the bytes of a rank, collectives against the floor, what to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtplan.planner.bound import BoundPlan
from dtplan.planner.ledger import Entry, Floor, Ledger
from dtplan.report.page.mesh import Mesh
from dtplan.report.page.moves import WORDS
from dtplan.report.page.proofs import ProofView
from dtplan.report.page.words import percent

STATES = (("parameters", 1), ("gradients", 1), ("AdamW moments", 2))
"""What a rank keeps between steps, in sizes of its parameters, all in the parameters' dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a bar: bytes, and where it lies (percent)."""

    name: str
    bytes: int
    at: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorView:
    """Collectives of a layer against the fewest; of ``count`` layers that make as many."""

    floor: Floor
    above: bool
    count: int
    each: int
    """Bytes of a call; 0 where calls differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The overview."""

    essence: tuple[str, ...]
    share: str
    model_bytes: int
    tp_bytes: int
    """Of a rank after tp alone."""
    rank_bytes: int
    states: tuple[Part, ...]
    state_bytes: int
    wire: tuple[Part, ...]
    """Bytes that a rank sends in a step, by axis."""
    wire_bytes: int
    calls: int
    kinds: tuple[FloorView, ...]
    """Layers by their number of collectives."""
    warnings: tuple[str, ...]


def facts(bound: BoundPlan, book: Ledger, mesh: Mesh, proof: ProofView | None) -> Facts:
    """The overview of a bound plan."""
    whole, kept = bound.parameter_bytes()
    wire = dict.fromkeys(("tp", "shard", "replicate"), 0)
    for entry in book.entries:
        wire[entry.axis] += entry.wire_bytes(bound.degrees[entry.axis])
    return Facts(
        essence=tuple(_essence(bound, book)),
        share=percent(bound.sharded_share()),
        model_bytes=whole,
        tp_bytes=_after_tp(bound),
        rank_bytes=kept,
        states=tuple(_bar([(name, times * kept) for name, times in STATES])),
        state_bytes=sum(times * kept for _, times in STATES),
        wire=tuple(_bar([(axis, sent) for axis, sent in wire.items() if sent])),
        wire_bytes=sum(wire.values()),
        calls=sum(entry.count for entry in book.entries),
        kinds=tuple(floor_kinds(book)),
        warnings=tuple(_warnings(bound, book, mesh, proof)),
    )


def _after_tp(bound: BoundPlan) -> int:
    """Bytes of a rank's parameters before FSDP2 cuts them."""
    return replace(bound, degrees={**bound.degrees, "shard": 1}).parameter_bytes()[1]


def _bar(parts: list[tuple[str, int]]) -> Iterator[Part]:
    total, at = sum(size for _, size in parts) or 1, 0.0
    for name, bytes_ in parts:
        width = 100 * bytes_ / total
        yield Part(name=name, bytes=bytes_, at=round(at, 3), width=round(width, 3))
        at += width


def _essence(bound: BoundPlan, book: Ledger) -> Iterator[str]:
    shard = bound.degrees["shard"]
    if not bound.modules:
        yield "No plan serves this class: nothing is cut on tp, and nothing is known here of what FSDP2 does to it."
    elif bound.tp > 1:
        then = f", and FSDP2 leaves 1/{shard} of that between steps" if shard > 1 else ""
        yield f"Each rank holds 1/{bound.tp} of {percent(bound.sharded_share())} of the parameters{then}."
    elif shard > 1:
        yield f"FSDP2 leaves each rank 1/{shard} of every parameter between steps."
    else:
        yield "Every rank holds the whole model."
    kinds = floor_kinds(book)
    for kind in kinds:
        subject = "A layer makes" if len(kinds) == 1 else f"{kind.count} layers make"
        yield f"{subject} {floor_words(kind.floor, book)}."


def floor_kinds(book: Ledger) -> list[FloorView]:
    """Layers that make as many collectives, and need as many, together."""
    together: dict[tuple[int, ...], list[Floor]] = {}
    for f in book.floors:
        together.setdefault((f.forward, f.backward, f.floor_forward, f.floor_backward), []).append(f)
    return [floor_view(fs[0], book, sum(f.count for f in fs)) for fs in together.values()]


def floor_view(floor: Floor, book: Ledger, count: int) -> FloorView:
    """A layer's collectives beside the fewest."""
    sizes = {entry.bytes for entry in _calls(floor, book)}
    return FloorView(floor=floor, above=above(floor), count=count, each=sizes.pop() if len(sizes) == 1 else 0)


def _calls(floor: Floor, book: Ledger) -> list[Entry]:
    """The collectives that a floor counts."""
    return [e for e in book.entries if e.axis == "tp" and e.layer == floor.layer and "gradients" not in e.cause]


def floor_words(floor: Floor, book: Ledger) -> str:
    """`2 + 2 all-reduces: the floor`."""
    kinds = {entry.kind for entry in _calls(floor, book)}
    word = " and ".join(f"{WORDS[kind]}s" for kind in sorted(kinds)) or "collectives"
    counts = f"{_pair(floor.forward, floor.backward)} {word}"
    if above(floor):
        return f"{counts}, above the floor of {_pair(floor.floor_forward, floor.floor_backward)}"
    return f"{counts}: the floor"


def _pair(forward: int, backward: int) -> str:
    """`2 + 2`, on one line."""
    return f"{forward}\u00a0+\u00a0{backward}"


def above(floor: Floor) -> bool:
    """Whether a layer makes more collectives than it must."""
    return floor.forward > floor.floor_forward or floor.backward > floor.floor_backward


def _warnings(bound: BoundPlan, book: Ledger, mesh: Mesh, proof: ProofView | None) -> Iterator[str]:
    for kind in floor_kinds(book):
        if kind.above:
            yield f"{kind.count} layers make {floor_words(kind.floor, book)}"
    yield from (line for floor in book.floors for line in floor.excess)
    if mesh.crosses:
        yield "A tp group spans hosts: its collectives leave the fast links inside a host"
    if bound.tp > 1 and bound.sharded_share() < 0.9:
        yield f"tp cuts only {percent(bound.sharded_share())} of the parameters; every rank holds all of the rest"
    for unit in bound.units:
        if bound.tp > 1 and unit.count % bound.tp:
            then = "rank 0 holds more than the last rank" if unit.indivisible == "uneven" else unit.indivisible
            yield f"{unit.name}: {unit.count} is not a multiple of {bound.tp}: {then}"
    if proof is not None:
        yield from _doubts(proof)


def _doubts(proof: ProofView) -> Iterator[str]:
    if not proof.of_this_plan:
        yield f"The proof is of another plan or model ({proof.architecture}, plan {proof.digest[:12]})"
    elif proof.verdict != "proved":
        yield f"The proof says: {proof.verdict}"
    elif not proof.covers:
        yield "The proof has no leg at this tp degree and these switches"
