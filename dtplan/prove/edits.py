"""Changes of a plan by a word: what a diagnosis says to write, in a form that can be tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dtplan.plan.paths import matches
from dtplan.plan.read import rules_for
from dtplan.plan.spec import RESIDUAL, Move, Place, Plan, R, Rule, Section
from dtplan.planner.match import renamed


@dataclass(frozen=True, slots=True)
class Edit:
    """Something to write in the rule of the module or parameter ``name``: as text, and as what it does to the rule."""

    name: str
    text: str
    write: Callable[[Rule], Rule] = dataclasses.field(compare=False)
    note: str = dataclasses.field(default="", compare=False)
    """What it changes, for people."""

    def __str__(self) -> str:
        return f"`{self.text}`" if self.text else "no `localize`"


def _setting(name: str, text: str, **fields: Any) -> Edit:
    return Edit(name, text, lambda rule: dataclasses.replace(rule, **fields))


def output_residual(name: str) -> Edit:
    """What the module hands out is summed."""

    def write(rule: Rule) -> Rule:
        position = next((position for position, _ in rule.outputs), None)
        return dataclasses.replace(rule, outputs=((position, Move(dst=RESIDUAL)),))

    return Edit(name, "output: residual", write)


def input_whole(name: str) -> Edit:
    """The module's input is whole, and its gradient is summed."""

    def write(rule: Rule) -> Rule:
        value = next((value for value, _ in rule.inputs), 0)
        return dataclasses.replace(rule, inputs=((value, Move(dst=R)),))

    return Edit(name, "input: R", write)


def whole_inside(name: str) -> Edit:
    """The module works on the whole stream and hands its part of the result back, alike on every rank."""

    def write(rule: Rule) -> Rule:
        moves: dict[str, Any] = {"inputs": ((0, Move(dst=R)),), "outputs": ((None, Move(dst=RESIDUAL)),)}
        return dataclasses.replace(rule, style="replicate", **moves)

    return Edit(name, "style: replicate, input: R, output: residual", write)


def input_unit(name: str, value: str | int, unit: str) -> Edit:
    """An input that is cut holds groups of units, and each group is cut."""

    def write(rule: Rule) -> Rule:
        inputs = tuple((v, dataclasses.replace(m, unit=unit) if v == value else m) for v, m in rule.inputs)
        return dataclasses.replace(rule, inputs=inputs)

    return Edit(name, f"unit: {unit}", write, f" for its input {value}")


def gradient(name: str, kind: str) -> Edit:
    """The gradient of what stays whole is a ``sum``, or ``complete``."""
    return _setting(name, f"grad: {kind}", grad=kind)


def section_gradient(name: str, kind: Literal["sum", "complete"]) -> Edit:
    """The gradient of the sections that stay whole is a ``sum``, or ``complete``."""

    def write(rule: Rule) -> Rule:
        parts = (dataclasses.replace(s, grad=kind) if s.whole else s for s in rule.sections)
        return dataclasses.replace(rule, sections=tuple(parts))

    return Edit(name, f"grad: {kind}", write, " for its sections that are whole")


def added_once(name: str) -> Edit:
    """One rank adds the parameter."""
    return _setting(name, "once: true", once=True, grad=None)


def sections(name: str, units: Iterable[str]) -> Edit:
    """The dim that is cut holds parts one after another."""
    parts = tuple(units)
    return _setting(
        name, f"sections: [{', '.join(parts)}]", unit=None, sections=tuple(Section(unit=unit) for unit in parts)
    )


def one_piece(name: str, unit: str) -> Edit:
    """The dim that is cut is one part, in units."""
    return _setting(name, f"unit: {unit}", unit=unit, sections=())


def colwise(name: str, unit: str) -> Edit:
    """A whole layer is cut along its columns."""
    return _setting(name, f"style: colwise, unit: {unit}", style="colwise", unit=unit, grad=None, inputs=(), outputs=())


def sharded_norm(name: str) -> Edit:
    """A norm over a dim that is cut takes its sum of squares over ranks."""
    return _setting(name, "style: sharded_norm", style="sharded_norm")


def localize(name: str, numbers: Iterable[str]) -> Edit:
    """These numbers of a module are divided by the degree, and no others."""
    kept = tuple(numbers)
    return _setting(name, f"localize: [{', '.join(kept)}]" if kept else "", localize=kept)


def edited(plan: Plan, model: nn.Module, edits: Iterable[Edit]) -> Plan:
    """``plan`` as it would be with ``edits`` written into it; a rule that is not there yet is added."""
    for edit in edits:
        rule = rule_of(plan, model, edit.name)
        if rule is None:
            plan = dataclasses.replace(plan, rules=(*plan.rules, edit.write(_new_rule(plan, edit.name))))
        else:
            plan = _written(plan, rule.at, edit)
    return plan


def rule_of(plan: Plan, model: nn.Module, name: str) -> Rule | None:
    """The rule, as written, that names the module or parameter ``name`` of the model itself."""
    written = rules_for(plan, getattr(model, "config", None))
    path = tuple(name.split("."))
    as_named, _ = renamed(written, model, plan.names)
    hits = [rule for rule, found in zip(written, as_named, strict=True) if matches(found.path, path)]
    return next((rule for rule in hits if rule.override), hits[0] if hits else None)


def pattern_of(name: str) -> str:
    """A name with ``*`` for the numbers of its layers."""
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))


def _new_rule(plan: Plan, name: str) -> Rule:
    return Rule(path=tuple(pattern_of(name).split(".")), at=Place(plan.files[0], 0, 0))


def _written(plan: Plan, at: Place, edit: Edit) -> Plan:
    """Every rule of one line is changed, as braces make several of it."""

    def changed(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(edit.write(rule) if rule.at == at else rule for rule in rules)

    variants = tuple(dataclasses.replace(variant, rules=changed(variant.rules)) for variant in plan.variants)
    return dataclasses.replace(plan, rules=changed(plan.rules), variants=variants)
