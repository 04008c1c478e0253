"""What the differences between two bound plans add to a step or take away: the ledger's entries, module by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, BoundTensor, dtype_bytes
from dtplan.planner.ledger import OUTSIDE, Entry, Kind, layer_of, move_entries, norm_entries
from dtplan.report.diff import Effect
from dtplan.report.words import spelled

Costs = dict[tuple[str, str, Kind], tuple[int, int]]
"""Axis, direction and collective -> calls, and bytes that a rank sends."""


class Side:
    """One of the two bound plans, by module name."""

    def __init__(self, bound: BoundPlan, rows: int, dtype: str) -> None:
        self.bound, self.rows, self.tokens = bound, rows, rows * dtype_bytes(dtype)
        self.entries = {name: module for module in bound.modules for name in module.names}

    def costs(self, module: BoundModule | None, entries: Iterable[Entry], names: int) -> Costs:
        """Of ``names`` of the modules that ``module`` stands for, with all of whose ``entries``."""
        if module is None or self.bound.tp == 1:
            return {}
        costs: Costs = {}
        for entry in entries:
            sent = entry.wire_bytes(self.bound.degrees[entry.axis]) * names // len(module.names)
            costs[entry.axis, entry.direction, entry.kind] = (entry.count * names // len(module.names), sent)
        return costs

    def kept_bytes(self, tensor: BoundTensor | None, names: int) -> int:
        """Bytes of parameters that rank 0 keeps of ``names`` such tensors."""
        if tensor is None or tensor.buffer or tensor.tied_to is not None:
            return 0
        return names * math.prod(self.bound.shard_shape(tensor)) * dtype_bytes(tensor.dtype)

    def summed_bytes(self, tensor: BoundTensor | None, names: int) -> int:
        """Bytes that a rank sends to sum the gradients of ``names`` such tensors."""
        if tensor is None or self.bound.tp == 1:
            return 0
        sent = sum(count * 2 * (ranks - 1) / ranks for ranks, count in tensor.summed_elements(self.bound.tp).items())
        return int(names * sent * dtype_bytes(tensor.dtype))


@dataclass(frozen=True, slots=True)
class Pair:
    """Modules that are alike on both sides, and what either side does to them."""

    names: list[str]
    before: Side
    one: BoundModule | None
    after: Side
    other: BoundModule | None

    @property
    def label(self) -> str:
        """The modules as one path."""
        for module in (self.one, self.other):
            if module is not None and set(module.names) == set(self.names):
                return module.pattern or "."
        return spelled(self.names)

    @property
    def layers(self) -> int:
        """The number of layers that the modules lie in; 1 outside of them."""
        for side, module in ((self.after, self.other), (self.before, self.one)):
            if module is not None and layer_of(side.bound, module) != OUTSIDE:
                return len(self.names)
        return 1


def tensor_effects(pair: Pair, one: BoundTensor | None, other: BoundTensor | None) -> list[Effect]:
    """Parameters kept, and gradients summed, of one tensor."""
    number = len(pair.names)
    kept = pair.after.kept_bytes(other, number) - pair.before.kept_bytes(one, number)
    summed = pair.after.summed_bytes(other, number) - pair.before.summed_bytes(one, number)
    effects = [Effect(what="parameters", bytes=kept)] if kept else []
    return effects + ([Effect(what="gradient sum", axis="tp", direction="backward", bytes=summed)] if summed else [])


def move_effects(pair: Pair, one: BoundMove | None, other: BoundMove | None) -> list[Effect]:
    """Collectives of one input or output."""
    return _effects(pair, *(_move_costs(pair, side, move) for side, move in ((0, one), (1, other))))


def norm_effects(pair: Pair) -> list[Effect]:
    """Collectives of a norm over a dim that is cut."""
    costs = []
    for side, module in ((pair.before, pair.one), (pair.after, pair.other)):
        entries = () if module is None else norm_entries(side.bound, module, side.rows)
        costs.append(side.costs(module, entries, len(pair.names)))
    return _effects(pair, *costs)


def all_effects(pair: Pair) -> Iterator[Effect]:
    """Those of modules that only one side has."""
    for tensor in () if pair.one is None else pair.one.tensors:
        yield from tensor_effects(pair, tensor, None)
    for tensor in () if pair.other is None else pair.other.tensors:
        yield from tensor_effects(pair, None, tensor)
    for move in () if pair.one is None else named_moves(pair.one).values():
        yield from move_effects(pair, move, None)
    for move in () if pair.other is None else named_moves(pair.other).values():
        yield from move_effects(pair, None, move)
    yield from norm_effects(pair)


def _move_costs(pair: Pair, at: int, move: BoundMove | None) -> Costs:
    side, module = ((pair.before, pair.one), (pair.after, pair.other))[at]
    if move is None or module is None:
        return {}
    return side.costs(module, move_entries(side.bound, module, move, side.tokens), len(pair.names))


def _effects(pair: Pair, before: Costs, after: Costs) -> list[Effect]:
    effects = []
    for call in dict.fromkeys([*before, *after]):
        one, other = before.get(call, (0, 0)), after.get(call, (0, 0))
        if one != other:
            axis, direction, kind = call
            calls, sent = (b - a for a, b in zip(one, other, strict=True))
            effects.append(
                Effect(what=kind, axis=axis, direction=direction, calls=calls, layers=pair.layers, bytes=sent)
            )
    return effects


def named_moves(module: BoundModule) -> dict[str, BoundMove]:
    """What the moves are called -> the moves."""
    named = {"input" if move.value in (0, None) else f"input {move.name}": move for move in module.inputs}
    if module.shared is not None:
        named["input of the norms"] = module.shared
    return named | {"output" if move.value is None else f"output {move.value}": move for move in module.outputs}
