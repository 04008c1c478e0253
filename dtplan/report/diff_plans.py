"""What two plans say differently, without a model: rule by rule, with defaults filled in.

Without a model a default is that of a linear layer. What a rule names, and what the difference costs, only a binding
can say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping

from dtplan.plan.spec import RESIDUAL, Layout, Move, P, Plan, R, Rule, S, Section, TeLayer, Tie, Unit
from dtplan.report.diff import Diff, Difference, by_item, by_key, by_te, folded, others, word

Said = dict[str, str]
"""What a rule says: key of the language -> value in the plan's words."""


def diff_plans(before: Plan, after: Plan) -> Diff:
    """Every difference in meaning between two plans."""
    found = [*_heads(before, after), *_all_rules(before, after), *_tails(before, after)]
    alike = before.name == after.name
    titles = [f"{plan.name} ({plan.files[0]})" if alike else plan.name for plan in (before, after)]
    return Diff(before=f"plan {titles[0]}", after=f"plan {titles[1]}", differences=folded(found))


def _heads(before: Plan, after: Plan) -> Iterator[Difference]:
    yield from by_key("", {"serves": _set(before.serves)}, {"serves": _set(after.serves)})
    units = [{name: _unit(unit) for name, unit in plan.units.items()} for plan in (before, after)]
    yield from by_key("units", *units)
    residual = [{"sequence_parallel": str(plan.sequence_parallel)} for plan in (before, after)]
    yield from by_key("residual", *residual)


def _tails(before: Plan, after: Plan) -> Iterator[Difference]:
    yield from by_item("", "ties", sorted(_ties(before.ties)), sorted(_ties(after.ties)))
    names = [{name: word(others) for name, others in plan.names.items()} for plan in (before, after)]
    yield from by_key("names", *names)
    yield from by_te(before.te, after.te)
    yield from by_key("fsdp", _fsdp(before), _fsdp(after))


def _all_rules(before: Plan, after: Plan) -> Iterator[Difference]:
    yield from _rules(_said_rules(before, before.rules), _said_rules(after, after.rules))
    sides = [_variants(plan) for plan in (before, after)]
    for when in dict.fromkeys([*sides[0], *sides[1]]):
        one, other = (side.get(when, _Variant()) for side in sides)
        found = [
            *_rules(one.rules, other.rules),
            *by_te(one.te, other.te),
            *by_item("", "ties", sorted(one.ties), sorted(other.ties)),
        ]
        yield from (dataclasses.replace(difference, when=when) for difference in found)


class _Variant:
    """All variants of a plan with the same `when`, together."""

    def __init__(self) -> None:
        self.rules: dict[str, Said] = {}
        self.te: tuple[TeLayer, ...] = ()
        self.ties: set[str] = set()


def _variants(plan: Plan) -> dict[str, _Variant]:
    found: dict[str, _Variant] = {}
    for variant in plan.variants:
        when = ", ".join(f"{field}: {json.dumps(value)}" for field, value in sorted(variant.when.items()))
        one = found.setdefault(when, _Variant())
        one.rules |= _said_rules(plan, variant.rules)
        one.te += variant.te
        one.ties |= _ties(variant.ties)
    return found


# --- rules


def _rules(before: Mapping[str, Said], after: Mapping[str, Said]) -> Iterator[Difference]:
    for path in dict.fromkeys([*before, *after]):
        label = path or "."
        one, other = before.get(path), after.get(path)
        if one is None or other is None or one.get("style") != other.get("style"):
            yield Difference(path=label, what="rule", before=_flow(one), after=_flow(other))
        else:
            yield from by_key(label, one, other)


def _flow(said: Said | None) -> str | None:
    """A whole rule in the plan's words; short as the plan may write it."""
    if said is None:
        return None
    if said.keys() == {"style"}:
        return said["style"]
    return _flow_mapping(said)


def _said_rules(plan: Plan, rules: Iterable[Rule]) -> dict[str, Said]:
    """Path -> what holds there; of two rules on one path the one that is marked."""
    everything = [*plan.rules, *(rule for variant in plan.variants for rule in variant.rules)]
    ordered = sorted(rules, key=lambda rule: rule.override)
    return {rule.pattern: _Saying(rule, plan, everything).said() for rule in ordered}


class _Saying:
    """One rule and what lies around it."""

    def __init__(self, rule: Rule, plan: Plan, everything: list[Rule]) -> None:
        self.rule, self.plan, self.everything = rule, plan, everything

    def said(self) -> Said:
        """The rule's keys and values, those that it leaves to the language's defaults filled in."""
        rule = self.rule
        said = {
            "style": rule.style,
            "shard": rule.shard,
            "unit": rule.unit,
            "sections": tuple(map(_section, rule.sections)) or None,
            "input": self._moves(self._inputs(), first=0, side="input"),
            "output": self._moves(self._outputs(), first=None, side="output"),
            "localize": tuple(sorted(rule.localize)) or None,
            "localize_per": _flow_mapping(dict(rule.localize_per)) if rule.localize_per else None,
            "reads": tuple(sorted(rule.reads)) or None,
        }
        told = {key: word(value) for key, value in said.items() if value is not None}
        return told | others(rule, ("path", "at", "inputs", "outputs", *said))

    def _inputs(self) -> list[tuple[str | int, Move]]:
        moves = list(self.rule.inputs)
        if not moves and self.rule.style == "colwise" and not self._in_a_region():
            return [(0, Move(dst=R))]
        if self.rule.style == "norm" and not self._in_a_region():
            if not moves:
                return [(0, Move(dst=RESIDUAL))]
            return [(value, Move(dst=RESIDUAL) if move == Move() else move) for value, move in moves]
        if self.rule.style != "colwise":
            return [(value, move) for value, move in moves if move != Move()]  # as it comes
        return moves

    def _outputs(self) -> list[tuple[int | None, Move]]:
        gives, moves = self._gives(), list(self.rule.outputs)
        if self.rule.style in ("rowwise", "vocab"):
            moves = moves or [(None, Move(dst=RESIDUAL))]
            return [
                (value, _without_source(Move(dst=gives) if move == Move() else move, gives)) for value, move in moves
            ]
        kept = [(value, _without_source(move, gives)) for value, move in moves]
        return [(value, move) for value, move in kept if move not in (Move(), Move(dst=gives))]

    def _gives(self) -> Layout | None:
        """The layout in which the style computes; None where the degree may decide it."""
        unit = self.plan.units.get(self.rule.unit or "")
        if unit is not None and unit.indivisible.startswith("replicate"):
            return None
        known = {"colwise": S(-1), "norm": RESIDUAL, "replicate": R, "rowwise": P, "vocab": P}
        return known.get(self.rule.style or "")

    def _in_a_region(self) -> bool:
        """Whether some rule above prepares the input; one of any variant counts."""
        return any(_is_above(other, self.rule) and _prepares(other) for other in self.everything)

    def _moves(self, moves: Iterable[tuple[str | int | None, Move]], *, first: int | None, side: str) -> str | None:
        told = [(value, _move(move, side)) for value, move in sorted(moves, key=lambda pair: str(pair[0]))]
        if len(told) == 1 and told[0][0] == first:
            return told[0][1]
        return _flow_mapping({str(value): text for value, text in told}) if told else None


def _without_source(move: Move, gives: Layout | None) -> Move:
    if move.src is None or move.src != gives:
        return move
    return Move(dst=move.dst, global_shape=move.global_shape, unit=move.unit, sum_grad_of_last=move.sum_grad_of_last)


def _is_above(other: Rule, rule: Rule) -> bool:
    above = rule.path[: len(other.path)]
    return len(above) < len(rule.path) and all(a == b or "*" in (a, b) for a, b in zip(other.path, above, strict=True))


def _prepares(rule: Rule) -> bool:
    return rule.style != "replicate" and bool(rule.parallel_residual or any(move.dst == R for _, move in rule.inputs))


def _move(move: Move, side: str) -> str:
    dst = "keep" if move.dst is None else str(move.dst)
    src = None if move.src is None or (side == "input" and move.src == RESIDUAL) else str(move.src)
    told = ({"from": src} if src else {}) | {"to": dst} | others(move, ("src", "dst"))
    return dst if told.keys() == {"to"} else _flow_mapping(told)


def _section(section: Section) -> str:
    told = others(section, ())
    return told["unit"] if told.keys() == {"unit"} else _flow_mapping(told)


def _flow_mapping(said: Said) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in said.items()) + "}"


# --- the plan's other keys


def _unit(unit: Unit) -> str:
    fields = unit.fields[0] if len(unit.fields) == 1 else word(unit.fields)
    told = {"field": fields} | others(unit, ("name", "fields", "at"))
    return fields if told.keys() == {"field"} else _flow_mapping(told)


def _fsdp(plan: Plan) -> Mapping[str, str | None]:
    units = _set(".".join(unit) for unit in plan.fsdp.units)
    defaults = {"reshard_after_forward": "true"}
    return {"units": units} | defaults | others(plan.fsdp, ("units", "at"))


def _ties(ties: Iterable[Tie]) -> set[str]:
    return {" = ".join(sorted(tie.names)) for tie in ties}


def _set(words: Iterable[str]) -> str | None:
    return ", ".join(sorted(words)) or None
