"""From the layouts that a rule names to the operation at a module's edge that gets there."""

from __future__ import annotations

from dataclasses import dataclass

from dtplan.plan.spec import LOGITS, RESIDUAL, Layout, Move, R, S
from dtplan.planner.bound import BoundMove, Op


class NoMove(ValueError):
    """No operation leads from one layout to the other."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """What the named layouts stand for under the chosen switches."""

    residual: Layout
    logits: Layout

    def resolve(self, layout: Layout) -> Layout:
        """``layout`` without names."""
        return {RESIDUAL: self.residual, LOGITS: self.logits}.get(layout, layout)


_INTO: dict[tuple[str, str, bool], Op] = {
    # (from, to, whether every rank does the same with the value)
    ("R", "R", False): "copy",
    ("R", "R", True): "keep",
    ("S", "R", False): "gather",
    ("S", "R", True): "gather_whole",
    ("R", "S", False): "slice",
    ("R", "P", False): "place",
    ("S", "P", False): "place",
}
_OUT_OF: dict[tuple[str, str], Op] = {
    ("P", "R"): "reduce",
    ("P", "S"): "scatter",
    ("P", "P"): "keep",
    ("S", "R"): "gather_whole",
    ("R", "R"): "keep",
    ("R", "S"): "slice",
}


def input_move(move: Move, layouts: Layouts, *, value: int | None, name: str | None, whole: bool) -> BoundMove:
    """The operation on an input: it arrives as ``move.src`` (the residual by default) and is needed as ``move.dst``."""
    src = layouts.resolve(move.src or RESIDUAL)
    wanted = move.dst
    dst = src if wanted is None else layouts.resolve(wanted)
    op: Op | None
    if wanted is None or wanted == RESIDUAL or (src == dst and src.word != "R"):
        op = "keep" if src == dst else None
    else:
        op = _INTO.get((src.word, dst.word, whole))
    return _bound(op, move, src, dst, value, name)


def output_move(move: Move, layouts: Layouts, *, value: int | None, gives: Layout) -> BoundMove:
    """The operation on an output: the module computes it as ``gives`` unless ``move.src`` says otherwise."""
    src = layouts.resolve(move.src) if move.src else layouts.resolve(gives)
    dst = src if move.dst is None else layouts.resolve(move.dst)
    op: Op | None = "keep" if src == dst else _OUT_OF.get((src.word, dst.word))
    return _bound(op, move, src, dst, value, None)


def _bound(op: Op | None, move: Move, src: Layout, dst: Layout, value: int | None, name: str | None) -> BoundMove:
    if op is None:
        raise NoMove(f"no operation leads from {src} to {dst} here")
    global_shape = (move.global_shape or move.dst == LOGITS) and dst.word == "S"  # code outside reads logits
    return BoundMove(value=value, name=name, op=op, src=src, dst=dst, global_shape=global_shape)


def layouts_for(sequence_dim: Layout, *, sequence_parallel: bool, loss_parallel: bool) -> Layouts:
    """The named layouts under the two switches."""
    return Layouts(residual=sequence_dim if sequence_parallel else R, logits=S(-1) if loss_parallel else R)
