"""Moves as people read them: which collective a value or its gradient costs on its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, dtype_bytes
from dtplan.planner.ledger import Ledger, move_entries

WORDS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveView:
    """A change of layout: what it costs forward and backward, and how large a call is (bytes of the whole)."""

    side: str
    """`in`, `out`, or `inside` the module."""
    what: str
    """Which argument or returned value; empty for the only one."""
    op: str
    src: str
    dst: str
    forward: str
    backward: str
    bytes: int
    global_shape: bool
    inside: bool

    @property
    def costs(self) -> bool:
        """Whether anything is sent."""
        return bool(self.forward or self.backward)


def moves_of(bound: BoundPlan, book: Ledger, module: BoundModule | None) -> Iterator[MoveView]:
    """The moves around a module, inputs first; nothing is sent at tp 1."""
    if module is None:
        return
    shared = () if module.shared is None else (module.shared,)
    for side, moves in (("in", (*module.inputs, *shared)), ("out", module.outputs)):
        for move in moves:
            yield _view(bound, book, module, side, move)
    if module.norm is not None and bound.tp > 1:
        yield _sum(book, module)


def _sum(book: Ledger, module: BoundModule) -> MoveView:
    """What a norm over a dim that is cut sends: sums over the whole dim."""
    sizes = [entry.bytes for entry in book.entries if entry.cause == module.pattern and entry.kind == "all_reduce"]
    word = WORDS["all_reduce"]
    return MoveView(
        side="inside",
        what=module.pattern.rpartition(".")[2],
        op="norm",
        src="S(-1)",
        dst="S(-1)",
        forward=word,
        backward=word,
        bytes=min(sizes, default=0),
        global_shape=False,
        inside=False,
    )


def _view(bound: BoundPlan, book: Ledger, module: BoundModule, side: str, move: BoundMove) -> MoveView:
    tokens = book.batch * book.sequence * dtype_bytes(book.dtype)
    entries = list(move_entries(bound, module, move, tokens)) if bound.tp > 1 else []
    kinds = {way: ", ".join(WORDS[e.kind] for e in entries if e.direction == way) for way in ("forward", "backward")}
    return MoveView(
        side=side,
        what=move.name or ("" if move.value in (0, None) else f"value {move.value}"),
        op=move.op,
        src=str(move.src),
        dst=str(move.dst),
        forward=kinds["forward"],
        backward=kinds["backward"],
        bytes=max((entry.bytes for entry in entries), default=0),
        global_shape=move.global_shape,
        inside=move.inside,
    )
