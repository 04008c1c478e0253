"""What differs between two plans, two bound plans, or a plan and a live model: data, text and JSON.

Order of rules, spelling, aliases, comments and defaults make no difference. Bound plans are compared by what they do to
each module, so that a difference comes with what it costs: collectives, bytes, memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtplan.plan.spec import TeLayer
from dtplan.planner.bound import BoundTe
from dtplan.report.words import braced, size

SCHEMA_VERSION = 1
_ROLES = ("norm", "linear", "gate", "up", "down", "attention")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a difference adds (or, below zero, takes away) on each rank in one step."""

    what: Literal["all_reduce", "all_gather", "reduce_scatter", "gradient sum", "parameters"]
    """A collective; bytes in the one sum of all whole parameters' gradients; or bytes of parameters on rank 0."""
    axis: str = ""
    direction: str = ""
    calls: int = 0
    layers: int = 1
    """The number of modules that make the calls, one for each layer."""
    bytes: int = 0
    """Bytes that a rank sends; of parameters, bytes that rank 0 keeps."""

    def __str__(self) -> str:
        if self.what == "parameters":
            return f"{_signed(self.bytes)} of parameters on rank 0"
        if self.what == "gradient sum":
            return f"{_signed(self.bytes)} on the wire in the sum of gradients"
        if self.calls == 0:
            return f"other {self.what.replace('_', '-')}s {self.direction}"
        each, rest = divmod(abs(self.calls), max(self.layers, 1))
        many = self.layers > 1 and not rest
        count = each if many else abs(self.calls)
        name = self.what.replace("_", "-") + ("s" if count > 1 else "")
        on = "" if self.axis == "tp" else f" on {self.axis}"
        sign = "+" if self.calls > 0 else "-"
        return f"{sign}{count} {name}{on}{' a layer' if many else ''} {self.direction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is otherwise: where, what, and its value on either side (None: it is not there)."""

    path: str
    """A path of the plan's rules or the model's modules, with `*` and braces; or the plan's key, as ``units.head``."""
    what: str
    """A key of the plan's language, or the name of a tensor, a setting, a total."""
    before: str | None
    after: str | None
    effects: tuple[Effect, ...] = ()
    when: str = ""
    """The condition of the plan's variant that says it."""

    def __str__(self) -> str:
        condition = f" (when {self.when})" if self.when else ""
        where = f"{self.path}{condition}: {self.what}" if self.path else f"{self.what}{condition}"
        if self.before is None:
            told = f"{where} added: {self.after}"
        elif self.after is None:
            told = f"{where} removed: {self.before}"
        else:
            told = f"{where} {self.before} -> {self.after}"
        calls = [e for e in self.effects if e.what in COLLECTIVES]
        others = [str(e) for e in self.effects if e.what not in COLLECTIVES]
        if calls:
            sent = sum(e.bytes for e in calls)
            wire = f"{_signed(sent)} on the wire" if sent else "as much on the wire"
            others.append(", ".join([*map(str, calls), wire]))
        return "; ".join([told, *others])


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """All differences of two things that were compared; ``totals`` and ``notes`` follow from them."""

    before: str
    after: str
    """What was compared, in words."""
    differences: tuple[Difference, ...]
    totals: tuple[Difference, ...] = ()
    """Of bound plans: sums over a step, and what a rank keeps; those that differ."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, else 1."""
        return 0 if self.equal else 1

    def as_text(self) -> str:
        """A line each, those of one path together."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.equal:
            yield f"no difference: {self.before} and {self.after}"
        else:
            yield f"--- {self.before}"
            yield f"+++ {self.after}"
            yield from map(str, self.differences)
        if self.totals:
            yield "in all:"
            yield from (f"  {total}" for total in self.totals)
        yield from (f"note: {note}" for note in self.notes)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON data."""
        return {"schema_version": SCHEMA_VERSION, "equal": self.equal, **dataclasses.asdict(self)}


def diff(before: Any, after: Any, *, batch: int = 1, sequence: int = 4096, dtype: str = "bfloat16") -> Diff:
    """What differs between two plans, two bound plans, or a plan (or bound plan) and a parallelized model.

    Args:
        before: a built-in plan's name, a file, a ``Plan``, a ``BoundPlan``, or a model that `parallelize` sharded.
        after: the same; a plan beside a model is bound to that model at its degrees and switches.
        batch: sequences of a step, for the costs of differences between bound plans.
        sequence: tokens of a sequence.
        dtype: of activations.

    Raises:
        PlanError, BindError: a plan is wrong, or does not fit the model.
        ApplyError: the model was not parallelized.
        TypeError: the two cannot be compared, as a plan with a bound plan.
    """
    from dtplan.plan.read import load_plan
    from dtplan.plan.spec import Plan
    from dtplan.planner.bound import BoundPlan
    from dtplan.report.diff_bound import diff_bound
    from dtplan.report.diff_plans import diff_plans

    sides = (before, after)
    if all(isinstance(side, str | Path | Plan) for side in sides):
        return diff_plans(load_plan(before), load_plan(after))
    if all(isinstance(side, BoundPlan) for side in sides):
        return diff_bound(before, after, batch=batch, sequence=sequence, dtype=dtype)
    if hasattr(after, "named_parameters"):
        from dtplan.report.diff_live import diff_live

        return diff_live(before, after, batch=batch, sequence=sequence, dtype=dtype)
    advice = "a plan with a plan, a bound plan with a bound plan, and any of them with a model, which comes last"
    raise TypeError(f"{_kind(before)} and {_kind(after)} cannot be compared; dtplan.diff compares {advice}")


def _kind(side: Any) -> str:
    return "a plan" if isinstance(side, str | Path) else f"a {type(side).__name__}"


def by_key(path: str, before: Mapping[str, str | None], after: Mapping[str, str | None]) -> Iterator[Difference]:
    """The keys of two mappings whose values differ, those of ``before`` first; a missing one is None."""
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield Difference(path=path, what=key, before=before.get(key), after=after.get(key))


def by_item(path: str, what: str, before: Sequence[str], after: Sequence[str]) -> Iterator[Difference]:
    """The items that only one of two lists has; or that they have them in another order."""
    gone, new = ([item for item in one if item not in other] for one, other in ((before, after), (after, before)))
    yield from (Difference(path=path, what=what, before=item, after=None) for item in gone)
    yield from (Difference(path=path, what=what, before=None, after=item) for item in new)
    if not gone and not new and before != after:
        order = ["; ".join(items) for items in (before, after)]
        yield Difference(path=path, what=f"order of {what}", before=order[0], after=order[1])


def by_te(before: Iterable[TeLayer | BoundTe], after: Iterable[TeLayer | BoundTe]) -> Iterator[Difference]:
    """The fused layers that differ, path by path. Their order counts: a module goes into the first that takes it."""
    sides = [_te_words(layers) for layers in (before, after)]
    for under in dict.fromkeys([*sides[0], *sides[1]]):
        yield from by_item(under, "te", *(side.get(under, []) for side in sides))


def _te_words(layers: Iterable[TeLayer | BoundTe]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for layer in layers:
        linears = ", ".join(layer.parts[role] for role in sorted(layer.parts, key=_number) if role not in _ROLES)
        parts = {role: layer.parts[role] for role in _ROLES if role in layer.parts}
        parts |= {"linears": f"[{linears}]"} if linears else {}
        parts |= {"activation": layer.activation} if layer.activation else {}
        parts |= {"approximate_gelu": "true"} if layer.approximate_gelu else {}
        inside = ", ".join(f"{key}: {value}" for key, value in {"layer": layer.layer, **parts}.items())
        under = layer.under if isinstance(layer.under, str) else ".".join(layer.under)
        told.setdefault(under, []).append(f"{{{inside}}}")
    return told


def others(value: Any, told: Collection[str]) -> dict[str, str]:
    """The fields of a data class that are not ``told`` otherwise, where they are not their defaults."""
    fields = [field for field in dataclasses.fields(value) if field.name not in told]
    said = {field.name: getattr(value, field.name) for field in fields}
    return {f.name: word(said[f.name]) for f in fields if said[f.name] not in (f.default, None, ())}


def _number(role: str) -> int:
    """The index in ``linears[1]``; JSON may have such keys in another order."""
    return int("".join(filter(str.isdigit, role)) or 0)


def word(value: Any) -> str:
    """A plain value, or a list of them, as YAML has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def folded(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Differences that say the same of sibling paths as one, with braces; their effects are added up."""
    groups: dict[object, list[Difference]] = {}
    for one in differences:
        parent, _, name = one.path.rpartition(".")
        shape = tuple((e.what, e.axis, e.direction, e.layers) for e in one.effects)
        plain = name.isidentifier() or name.isdigit()
        key = (parent, one.when, one.what, one.before, one.after, shape) if plain else (id(one),)
        groups.setdefault(key, []).append(one)
    return tuple(_folded(group) for group in groups.values())


def _folded(group: list[Difference]) -> Difference:
    if len(group) == 1:
        return group[0]
    parent = group[0].path.rpartition(".")[0]
    names = braced([one.path.rpartition(".")[2] for one in group])
    effects = [
        dataclasses.replace(of_one[0], calls=sum(e.calls for e in of_one), bytes=sum(e.bytes for e in of_one))
        for of_one in zip(*(one.effects for one in group), strict=True)
    ]
    path = f"{parent}.{names}" if parent else names
    return dataclasses.replace(group[0], path=path, effects=tuple(effects))


def _signed(number: int) -> str:
    return ("-" if number < 0 else "+") + size(abs(number))
