"""The ledger: which collectives a step makes, how many bytes each moves, and how few there could be.

Arithmetic on a bound plan: no tensors, no ranks. Bytes are those of the whole tensor that a call moves; on
the wire a ring sends 2(n-1)/n of them for an all-reduce and (n-1)/n for a gather or scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, dtype_bytes

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Direction = Literal["forward", "backward"]

_OPS: dict[str, tuple[Kind | None, Kind | None]] = {
    # operation -> what it does in forward and in backward (planner/collectives.py)
    "keep": (None, None),
    "place": (None, None),
    "copy": (None, "all_reduce"),
    "reduce": ("all_reduce", None),
    "gather": ("all_gather", "reduce_scatter"),
    "scatter": ("reduce_scatter", "all_gather"),
    "gather_whole": ("all_gather", None),
    "slice": (None, "all_gather"),
}
OUTSIDE = "outside the layers"
AGAIN = ": its input again"
"""Of a fused layer that gathers in backward what it gathered in forward."""
_BETWEEN = re.compile(r"\.(?![^{]*\})")
"""The dots between segments of a pattern, not those of `{0..3}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``count`` collectives of one kind in a step, each of ``bytes`` bytes, and the module that causes them."""

    layer: str
    """The pattern of the layer that the module lies in, or ``outside the layers``."""
    cause: str
    kind: Kind
    axis: str
    direction: Direction
    count: int
    bytes: int
    ranks: int | None = None
    """Of a part of the axis: how many ranks it joins."""

    def wire_bytes(self, size: int) -> int:
        """Bytes that each rank of an axis of ``size`` ranks sends in all calls, with a ring."""
        size = self.ranks or size
        share = (2 if self.kind == "all_reduce" else 1) * (size - 1) / size
        return int(self.count * self.bytes * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Collectives on tp of one layer in each direction, and the fewest that its cut regions need."""

    layer: str
    count: int
    forward: int
    backward: int
    floor_forward: int
    floor_backward: int
    excess: tuple[str, ...]
    """What makes the plan dearer than the floor, a line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All collectives of one step (forward and backward of one batch)."""

    batch: int
    sequence: int
    dtype: str
    fp8: bool = False
    """Whether what fused layers gather inside is in FP8, a byte a number."""
    entries: tuple[Entry, ...]
    floors: tuple[Floor, ...]

    @property
    def dtypes(self) -> str:
        """The dtypes of activations in words."""
        return self.dtype + (", gathered in FP8 by fused layers" if self.fp8 else "")

    def counts(self, axis: str = "tp") -> dict[tuple[Direction, Kind], int]:
        """Calls a step by direction and kind on one axis."""
        totals: dict[tuple[Direction, Kind], int] = {}
        for entry in self.entries:
            if entry.axis == axis:
                key = (entry.direction, entry.kind)
                totals[key] = totals.get(key, 0) + entry.count
        return totals


def ledger(
    bound: BoundPlan,
    *,
    batch: int = 1,
    sequence: int = 4096,
    dtype: str = "bfloat16",
    checkpointing: bool = False,
    fp8: bool = False,
) -> Ledger:
    """The ledger of one step on ``batch`` sequences of ``sequence`` tokens, with activations in ``dtype``.

    Recomputation (``checkpointing``) repeats a layer's forward collectives in backward; they are not counted. With
    ``fp8`` what fused layers gather is quantised before; the maxima for its scales, four bytes a call, are not counted.
    """
    tokens = batch * sequence * dtype_bytes(dtype)
    quantised = batch * sequence if fp8 else tokens
    data_parallel = bound.degrees["shard"] * bound.degrees["replicate"] > 1
    entries = list(_moves(bound, tokens, quantised)) if bound.tp > 1 else []
    if bound.tp > 1:
        entries += _norms(bound, batch * sequence)
        entries += _grad_sums(bound, by_unit=data_parallel or checkpointing)
        entries += _loss(bound, batch * sequence)
    entries += _fsdp(bound)
    floors = tuple(_floors(bound, entries)) if bound.tp > 1 else ()
    return Ledger(batch=batch, sequence=sequence, dtype=dtype, fp8=fp8, entries=tuple(entries), floors=floors)


def layer_of(bound: BoundPlan, module: BoundModule) -> str:
    """The pattern of the FSDP unit that a module lies in."""
    unit = _unit_of(bound, module.names[0]) if module.names else None
    return OUTSIDE if unit is None else ".".join(_BETWEEN.split(module.pattern)[: unit.count(".") + 1])


def _unit_of(bound: BoundPlan, name: str) -> str | None:
    """The FSDP unit that a module lies in."""
    return next((unit for unit in bound.fsdp_units if name == unit or name.startswith(unit + ".")), None)


def _moves(bound: BoundPlan, tokens: int, quantised: int) -> Iterator[Entry]:
    for module in bound.modules:
        shared = () if module.shared is None else (module.shared,)
        for move in (*module.inputs, *shared, *module.outputs):
            yield from move_entries(bound, module, move, tokens, quantised)


def move_entries(
    bound: BoundPlan, module: BoundModule, move: BoundMove, tokens: int, quantised: int | None = None
) -> Iterator[Entry]:
    """The collectives of one move of ``module``.

    ``tokens`` is the bytes of one feature of the whole batch, and ``quantised`` those of one that a fused layer
    gathers, if they are fewer. A fused layer keeps the rank's part of what it gathered, and gathers it again in
    backward for the gradient of its weight, unless that is frozen (TransformerEngine 2.20).
    """
    forward, backward = _OPS[move.op]
    calls: list[tuple[Direction, Kind | None, str]] = [("forward", forward, ""), ("backward", backward, "")]
    if _gathers_again(module, move):
        calls.append(("backward", "all_gather", AGAIN))
    features, own = _features(bound, move), tokens if quantised is None else quantised
    for direction, kind, why in calls:
        if kind is not None:
            yield Entry(
                layer=layer_of(bound, module),
                cause=module.pattern + why,
                kind=kind,
                axis="tp",
                direction=direction,
                count=len(module.names),
                bytes=features * (own if move.inside and kind == "all_gather" else tokens),
            )


def _gathers_again(module: BoundModule, move: BoundMove) -> bool:
    trains = any(t.trainable and t.placement.dim == 0 and len(t.shape) > 1 for t in module.tensors)
    return move.inside and move.op == "gather" and trains


def _norms(bound: BoundPlan, tokens: int) -> Iterator[Entry]:
    for module in bound.modules:
        yield from norm_entries(bound, module, tokens)


def norm_entries(bound: BoundPlan, module: BoundModule, tokens: int) -> Iterator[Entry]:
    """The collectives of a norm over a dim that is cut: a number a token, in float32."""
    directions: tuple[Direction, ...] = () if module.norm is None else ("forward", "backward")
    for direction in directions:
        yield Entry(
            layer=layer_of(bound, module),
            cause=module.pattern,
            kind="all_reduce",
            axis="tp",
            direction=direction,
            count=len(module.names) * (0 if module.norm is None else module.norm.means),
            bytes=4 * tokens,
        )


def _features(bound: BoundPlan, move: BoundMove) -> int:
    return move.last or move.length or bound.width


def _grad_sums(bound: BoundPlan, *, by_unit: bool) -> list[Entry]:
    """What ranks share and see parts of the work of: one all-reduce for all that as many share, or one a layer.

    Parts of matrices (kv heads) are summed layer by layer in any case.
    """
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for module in bound.modules:
        for tensor in module.tensors:
            layer = layer_of(bound, module) if by_unit or tensor.shared else OUTSIDE
            inside = layer != OUTSIDE
            for ranks, elements in tensor.summed_elements(bound.tp).items():
                size = elements * dtype_bytes(tensor.dtype) * (1 if inside else len(module.names))
                before = sizes.get((layer, ranks), (0, 0))[1]
                sizes[layer, ranks] = (len(module.names) if inside else 1, before + size)
    return [
        Entry(
            layer=layer,
            cause="gradients of whole parameters" if ranks == bound.tp else f"gradients of what {ranks} ranks share",
            kind="all_reduce",
            axis="tp",
            direction="backward",
            count=count,
            bytes=size,
            ranks=ranks,
        )
        for (layer, ranks), (count, size) in sizes.items()
    ]


def _loss(bound: BoundPlan, tokens: int) -> list[Entry]:
    if not bound.loss_parallel:
        return []
    return [
        Entry(
            layer=OUTSIDE,
            cause=cause,
            kind="all_reduce",
            axis="tp",
            direction="forward",
            count=1,
            bytes=4 * n * tokens,
        )
        for cause, n in (("loss: largest logit", 1), ("loss: sum and target", 2))
    ]


def _fsdp(bound: BoundPlan) -> Iterator[Entry]:
    shard, replicate = bound.degrees["shard"], bound.degrees["replicate"]
    if shard * replicate == 1:
        return
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for module in bound.modules:
        layer = layer_of(bound, module)
        repeats = len(module.names) if layer == OUTSIDE else 1
        kept = [t for t in module.tensors if not t.buffer and t.tied_to is None]
        sizes[layer] = sizes.get(layer, 0) + repeats * sum(
            math.prod(t.local_shape) * dtype_bytes(t.dtype) for t in kept
        )
        counts[layer] = 1 if layer == OUTSIDE else max(counts.get(layer, 0), len(module.names))
    for layer, size in sizes.items():
        if size == 0:
            continue
        gathers_again = layer != OUTSIDE and bound.fsdp["reshard_after_forward"] is not False
        calls: list[tuple[Kind, str, Direction]] = []
        if shard > 1:
            calls = [("all_gather", "shard", "forward"), ("reduce_scatter", "shard", "backward")]
            calls += [("all_gather", "shard", "backward")] if gathers_again else []
        if replicate > 1:
            calls.append(("all_reduce", "replicate", "backward"))
        for kind, axis, direction in calls:
            moved = size // shard if axis == "replicate" else size
            cause = "FSDP2 root" if layer == OUTSIDE else "FSDP2 unit"
            yield Entry(
                layer=layer,
                cause=cause,
                kind=kind,
                axis=axis,
                direction=direction,
                count=counts[layer],
                bytes=moved,
            )


def _floors(bound: BoundPlan, entries: Iterable[Entry]) -> Iterator[Floor]:
    """Per layer, against one collective in and one out, each way, for every region of cut work.

    A region is a module that holds row-parallel layers; the branches of a parallel residual are one region. A norm
    over a dim that is cut takes its own.
    """
    by_layer: dict[str, list[BoundModule]] = {}
    for module in bound.modules:
        by_layer.setdefault(layer_of(bound, module), []).append(module)
    entries = list(entries)
    for layer, modules in by_layer.items():
        if layer == OUTSIDE:
            continue
        joined = any(module.shared is not None for module in modules)
        rows = {m.pattern.rpartition(".")[0] for m in modules if _sums_a_product(m)}
        regions = 1 if joined else len(rows)
        each = 2 if bound.sequence_parallel else 1
        floor = regions * each + sum(module.norm.means for module in modules if module.norm is not None)
        number = len({_unit_of(bound, name) for module in modules for name in module.names})
        ours = [e for e in entries if e.layer == layer and e.axis == "tp" and not e.cause.startswith("gradients")]
        forward, backward = (sum(e.count for e in ours if e.direction == d) // number for d in ("forward", "backward"))
        yield Floor(
            layer=layer,
            count=number,
            forward=forward,
            backward=backward,
            floor_forward=floor,
            floor_backward=floor,
            excess=tuple(_excess(modules)) if max(forward, backward) > floor else (),
        )


def _sums_a_product(module: BoundModule) -> bool:
    """Whether it is a row-parallel layer, or is fused from one."""
    dims = {tensor.placement.dim for tensor in module.tensors}
    return 1 in dims if module.style == "te" else module.style == "rowwise" and dims != {None}


def _excess(modules: Iterable[BoundModule]) -> Iterator[str]:
    """Siblings that prepare the same input one by one, and fused layers that do not keep theirs."""
    alone: dict[str, list[BoundModule]] = {}
    for module in modules:
        if any(_gathers_again(module, move) for move in module.inputs):
            yield f"{module.pattern}: TransformerEngine gathers its input again for the weight's gradient"
        if module.style == "colwise" and any(move.op in ("copy", "gather") for move in module.inputs):
            alone.setdefault(module.pattern.rpartition(".")[0], []).append(module)
    for parent, siblings in alone.items():
        if len(siblings) > 1:
            names = ", ".join(module.pattern.rpartition(".")[2] for module in siblings)
            where = siblings[0].rule
            yield f"{parent}: {names} each prepare their input ({where}); one `{parent}: {{input: R}}` serves all"
