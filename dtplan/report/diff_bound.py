"""What two bound plans do differently: module by module, with what each difference adds to a step or takes away.

Modules are matched by their names, whatever rules they stand under. Names, digests and places of rules do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dtplan.planner.bound import BoundModule, BoundMove, BoundPlan, BoundTensor
from dtplan.planner.ledger import ledger
from dtplan.report.diff import Diff, Difference, Effect, by_item, by_key, by_te, folded, others, word
from dtplan.report.diff_effects import Pair, Side, all_effects, move_effects, named_moves, norm_effects, tensor_effects
from dtplan.report.diff_totals import totals
from dtplan.report.words import spelled

Words = dict[str, str | None]
_FROM = {"copy": "R", "slice": "R", "reduce": "P", "scatter": "P"}
"""Where operations lead from, where it goes without saying."""
_TOLD: dict[type, tuple[str, ...]] = {
    BoundModule: (
        *("pattern", "names", "rule"),  # do not count
        *("kind", "style", "tensors", "inputs", "outputs", "block", "shared", "localize", "per_unit", "norm"),
    ),
    BoundTensor: (
        *("name", "shape", "dtype", "placement", "local_shape", "sections", "unit", "grad", "once"),
        *("trainable", "buffer", "tied_to", "copies"),
    ),
    BoundMove: ("value", "name", "op", "src", "dst", "global_shape", "length", "inside", "units"),
}
"""Fields that have words of their own here; any other is told by its name."""


def diff_bound(
    before: BoundPlan, after: BoundPlan, *, batch: int = 1, sequence: int = 4096, dtype: str = "bfloat16"
) -> Diff:
    """Every difference between two bound plans; costs are those of a step on ``batch`` x ``sequence`` tokens."""
    sides = [Side(bound, batch * sequence, dtype) for bound in (before, after)]
    found = [*_settings(before, after), *_modules(*sides), *_rest(before, after)]
    books = [ledger(bound, batch=batch, sequence=sequence, dtype=dtype) for bound in (before, after)]
    notes = []
    if not found and before.digest != after.digest:
        notes.append("the plans differ in their text, which means nothing for this model at these degrees")
    if found:
        notes.append(f"costs are of one step on {batch} x {sequence} tokens, activations in {dtype}")
    return Diff(
        before=_title(before),
        after=_title(after),
        differences=folded(found),
        totals=tuple(totals((before, books[0]), (after, books[1]))),
        notes=tuple(notes),
    )


def _title(bound: BoundPlan) -> str:
    degrees = " x ".join(f"{axis} {number}" for axis, number in bound.degrees.items() if number > 1 or axis == "tp")
    switches = [name for name in ("sequence_parallel", "loss_parallel") if getattr(bound, name)]
    return ", ".join([f"plan {bound.plan} on {bound.architecture}", degrees, *switches])


def _settings(before: BoundPlan, after: BoundPlan) -> Iterator[Difference]:
    yield from by_key("", *(_setting_words(bound) for bound in (before, after)))
    units = [
        {
            unit.name: f"{unit.count}" + ("" if unit.indivisible == "error" else f", {unit.indivisible}")
            for unit in b.units
        }
        for b in (before, after)
    ]
    yield from by_key("units", *units)


def _setting_words(bound: BoundPlan) -> Words:
    switch = {True: "on", False: "off"}
    return {
        "model": bound.architecture,
        **{axis: str(number) for axis, number in bound.degrees.items()},
        "sequence_parallel": switch[bound.sequence_parallel],
        "loss_parallel": switch[bound.loss_parallel],
        "features of the residual stream": str(bound.width),
    }


def _rest(before: BoundPlan, after: BoundPlan) -> Iterator[Difference]:
    yield from by_item("", "tie", *(sorted(" = ".join(sorted(tie)) for tie in bound.ties) for bound in (before, after)))
    aliases = [{name: word(others) if others else None for name, others in b.aliases.items()} for b in (before, after)]
    yield from by_key("names", *aliases)
    yield from by_te(before.te, after.te)
    units = [{"units": spelled(bound.fsdp_units) if bound.fsdp_units else None} for bound in (before, after)]
    fsdp = [{key: None if value is None else word(value) for key, value in b.fsdp.items()} for b in (before, after)]
    yield from by_key("fsdp", units[0] | fsdp[0], units[1] | fsdp[1])


# --- modules


def _modules(before: Side, after: Side) -> Iterator[Difference]:
    repeated = _repeats(before, after)
    yield from {one.path: one for one in repeated.values()}.values()
    pairs: dict[tuple[int, int], list[str]] = {}
    for name in dict.fromkeys([*before.entries, *after.entries]):
        if any(name.startswith(f"{head}.") or name == head for head in repeated):
            continue
        one, other = before.entries.get(name), after.entries.get(name)
        pairs.setdefault((id(one), id(other)), []).append(name)
    for names in pairs.values():
        one, other = before.entries.get(names[0]), after.entries.get(names[0])
        yield from _module(Pair(names, before, one, after, other))


def _repeats(before: Side, after: Side) -> dict[str, Difference]:
    """Heads of names that one side alone has since a repeated module has more copies there, as one difference."""
    one, other = before.entries.keys(), after.entries.keys()
    patterns = {m.pattern for m in before.bound.modules} & {m.pattern for m in after.bound.modules}
    found: dict[str, Difference] = {}
    for name in (*(one - other), *(other - one)):
        module = before.entries.get(name) or after.entries[name]
        if module.pattern not in patterns or "*" not in module.pattern:
            continue
        layer = module.pattern.split(".").index("*") + 1
        head, pattern = ".".join(name.split(".")[:layer]), ".".join(module.pattern.split(".")[:layer])
        counts = [len({".".join(n.split(".")[:layer]) for n in names if _under(n, pattern)}) for names in (one, other)]
        found[head] = Difference(path=pattern, what="modules", before=str(counts[0]), after=str(counts[1]))
    return found


def _under(name: str, pattern: str) -> bool:
    words = pattern.split(".")
    return (
        all(word in ("*", have) for word, have in zip(words, name.split("."), strict=False))
        and name.count(".") >= len(words) - 1
    )


def _module(pair: Pair) -> Iterator[Difference]:
    one, other = pair.one, pair.other
    if one is None or other is None:
        told = [None if m is None else _summary(m, side.bound) for m, side in ((one, pair.before), (other, pair.after))]
        effects = tuple(all_effects(pair))
        yield Difference(path=pair.label, what="module", before=told[0], after=told[1], effects=effects)
        return
    found = list(by_key(pair.label, _facts(one), _facts(other)))
    yield from _with_effects(found, norm_effects(pair))
    yield from _tensors(pair, one, other)
    yield from _moves(pair, one, other)


def _facts(module: BoundModule) -> Words:
    return {
        "class": module.kind,
        "style": module.style or "none",
        "parallel residual": module.block,
        "localize": ", ".join(sorted(module.localize)) or None,
        "localize_per": ", ".join(f"{name} / {ranks}" for name, ranks in module.per_unit) or None,
        "norm over ranks": None if module.norm is None else f"{module.norm.kind}, eps {module.norm.eps}",
        **others(module, _TOLD[BoundModule]),
    }


def _summary(module: BoundModule, bound: BoundPlan) -> str:
    parts = [module.style or "none"]
    parts += [f"{tensor.name} {_placement(tensor)}" for tensor in module.tensors]
    parts += [f"{what} {_layout(move, bound)}" for what, move in named_moves(module).items() if _acts(move)]
    return ", ".join(parts)


# --- tensors


def _tensors(pair: Pair, one: BoundModule, other: BoundModule) -> Iterator[Difference]:
    sides = [{t.name: t for t in module.tensors} for module in (one, other)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = sides[0].get(name), sides[1].get(name)
        words = [_tensor_words(t) for t in (a, b)]
        if a is not None and b is not None and words[0] == words[1] and pair.before.bound.tp == pair.after.bound.tp:
            words = [{"on rank 0": _dims(t.local_shape)} for t in (a, b)]
        found = list(by_key(pair.label, *({f"{name} {key}".strip(): v for key, v in w.items()} for w in words)))
        yield from _with_effects(found, tensor_effects(pair, a, b))


def _tensor_words(tensor: BoundTensor | None) -> Words:
    if tensor is None:
        return {}
    return {
        "": _placement(tensor),
        "shape": _dims(tensor.shape),
        "dtype": tensor.dtype,
        "gradient": None if tensor.buffer else ("summed" if tensor.grad == "sum" else "complete"),
        "ranks that keep a part": ", ".join(map(str, tensor.copies)) if tensor.shared else "1",
        "added once": "yes" if tensor.once else None,
        "trainable": None if tensor.trainable or tensor.buffer else "no",
        "tied to": tensor.tied_to,
        **others(tensor, _TOLD[BoundTensor]),
    }


def _placement(tensor: BoundTensor) -> str:
    sections = f" in sections {_dims(tensor.sections)}" if tensor.sections else ""
    unit = f" in {tensor.unit}" if tensor.unit and tensor.placement.word == "S" else ""
    return f"{tensor.placement}{unit}{sections}"


def _dims(shape: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


# --- moves


def _moves(pair: Pair, one: BoundModule, other: BoundModule) -> Iterator[Difference]:
    sides = [named_moves(module) for module in (one, other)]
    for what in dict.fromkeys([*sides[0], *sides[1]]):
        a, b = sides[0].get(what), sides[1].get(what)
        words = [
            _layout(move, side.bound) if _acts(move) else None for move, side in ((a, pair.before), (b, pair.after))
        ]
        if words[0] is not None or words[1] is not None:
            words = [word or "as it is" for word in words]
        found = list(by_key(pair.label, {what: words[0]}, {what: words[1]}))
        yield from _with_effects(found, move_effects(pair, a, b))


def _acts(move: BoundMove | None) -> bool:
    """Whether anything is done to the value, or promised of it."""
    return move is not None and (move.op != "keep" or move.global_shape)


def _layout(move: BoundMove | None, bound: BoundPlan) -> str:
    """The layout that a value is given, in the plan's words, with the operation."""
    if move is None:
        return ""
    name = "residual" if move.dst == bound.residual and move.dst.word == "S" else str(move.dst)
    after = " as DTensor" if move.global_shape else ""
    units = f" in groups of {move.units}" if move.units is not None else ""
    inside = ", inside the fused layer" if move.inside else ""
    src = "" if move.src.word == _FROM.get(move.op) else f" from {move.src}"
    op = "" if move.op == "keep" else f" ({move.op}{src}{inside})"
    rest = "".join(f", {key}: {value}" for key, value in others(move, _TOLD[BoundMove]).items())
    return f"{name}{units}{op}{after}{rest}"


def _with_effects(found: list[Difference], effects: list[Effect]) -> Iterator[Difference]:
    """The differences of one tensor or move; the first tells the effects."""
    for at, one in enumerate(found):
        yield Difference(
            path=one.path,
            what=one.what,
            before=one.before,
            after=one.after,
            effects=tuple(effects) if at == 0 else (),
        )
