"""Checks of a whole plan that need no model: what its parts say about each other."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator

from dtplan._errors import Diagnostic, did_you_mean
from dtplan.plan.paths import PatternMap
from dtplan.plan.source import finding_at
from dtplan.plan.spec import Plan, Rule, TeLayer, Tie, Unit
from dtplan.plan.syntax import MAX_FINDINGS, and_more

Rules = PatternMap[Rule]


def findings_of(plan: Plan) -> tuple[Diagnostic, ...]:
    """Every finding, in the order of the file."""
    covered = Rules()
    for rule in all_rules(plan):
        covered.add(rule.path, rule)
    checks = (_what_was_read(plan), _unused_units(plan), _te(plan, covered), _ties(plan, covered))
    found = _bounded(itertools.chain(*checks), plan)
    return tuple(sorted(found, key=lambda f: (f.file, f.line, f.column, f.code)))


def findings_of_what_was_read(plan: Plan) -> list[Diagnostic]:
    """The findings that hold even where other rules of the file could not be read."""
    return _bounded(_what_was_read(plan), plan)


def _what_was_read(plan: Plan) -> Iterator[Diagnostic]:
    for check in (_overlaps, _undeclared_units, _contradictions, _todos):
        yield from check(plan)


def _bounded(findings: Iterator[Diagnostic], plan: Plan) -> list[Diagnostic]:
    found = list(itertools.islice(findings, MAX_FINDINGS))
    return [*found, and_more(plan.files[0])] if len(found) == MAX_FINDINGS else found


def all_rules(plan: Plan) -> tuple[Rule, ...]:
    """The plan's rules and those of every variant."""
    return plan.rules + tuple(rule for variant in plan.variants for rule in variant.rules)


def _as_written(plan: Plan) -> list[Rule]:
    """One rule for each place in the file, where braces make several of it."""
    return list({rule.at: rule for rule in reversed(all_rules(plan))}.values())[::-1]


def _overlaps(plan: Plan) -> Iterator[Diagnostic]:
    always = Rules()
    yield from _clashes(plan.rules, always)
    for variant in plan.variants:
        yield from _clashes(variant.rules, Rules(), always)


def _clashes(rules: tuple[Rule, ...], own: Rules, always: Rules | None = None) -> Iterator[Diagnostic]:
    """The first clash of each rule with one of ``always`` or an earlier one; fills ``own`` with the rules."""
    told = set()
    for rule in rules:
        others = [*(always.overlapping(rule.path) if always else ()), *own.overlapping(rule.path)]
        first = next((other for other in others if other.override == rule.override), None)
        if first is not None and (first.at, rule.at) not in told:
            told.add((first.at, rule.at))
            message = f"`{rule.pattern}` names what `{first.pattern}` names on {first.at.file}:{first.at.line}"
            yield finding_at("DTP301", rule.at, message, "keep one, or mark the winner with `override: true`")
        own.add(rule.path, rule)


def units_of(rule: Rule) -> list[str]:
    """The units that a rule names, for its dim, its sections, its inputs and its numbers."""
    units = [rule.unit, *(section.unit for section in rule.sections)]
    units += [move.unit for _, move in rule.inputs]
    units += [unit for _, unit in rule.localize_per]
    return [unit for unit in units if unit is not None]


def _undeclared_units(plan: Plan) -> Iterator[Diagnostic]:
    for rule in _as_written(plan):
        for unit in dict.fromkeys(units_of(rule)):
            if unit not in plan.units:
                hint = did_you_mean(unit, plan.units) or f"declare it under `units`: {unit}: CONFIG_FIELD"
                message = f"`{rule.pattern}` uses the unit `{unit}`, which is not declared"
                yield finding_at("DTP302", rule.at, message, hint)


def _unused_units(plan: Plan) -> Iterator[Diagnostic]:
    used = {unit for rule in all_rules(plan) for unit in units_of(rule)}
    undeclared = sorted(used - plan.units.keys())[:MAX_FINDINGS]
    meant = {name for unit in undeclared for name in difflib.get_close_matches(unit, plan.units, n=1)}
    for unit in plan.units.values():
        if unit.name not in used | meant and unit.at.file == plan.files[0]:
            yield _unused(unit)


def _unused(unit: Unit) -> Diagnostic:
    message = f"no rule uses the unit `{unit.name}`"
    hint = "remove it, or give it to the rules that it limits: else it limits nothing"
    return finding_at("DTP308", unit.at, message, hint)


def _contradictions(plan: Plan) -> Iterator[Diagnostic]:
    for rule in _as_written(plan):
        for message, hint in _rule_contradictions(rule):
            yield finding_at("DTP304", rule.at, f"`{rule.pattern}`: {message}", hint)


_CUTTING = ("colwise", "rowwise", "vocab", "sharded_norm")


def _rule_contradictions(rule: Rule) -> Iterator[tuple[str, str]]:
    styled, shard = rule.style in _CUTTING, rule.shard is not None
    cuts = styled or shard
    edges = rule.inputs or rule.outputs
    of_module = edges or rule.localize or rule.localize_per or rule.reads or rule.parallel_residual
    if rule.style is not None and shard:
        yield "`style` and `shard` both say how it is cut", "a style is for a module, `shard` for a parameter"
    if rule.grad == "sum" and cuts:
        how = f"style: {rule.style}" if styled else "shard"
        yield f"`{how}` and `grad: sum`", "what is cut has no partial gradient; `grad: sum` is for whole ones"
    if rule.once and cuts:
        yield "`once`, and it is cut", "`once` is for a whole parameter; a rowwise bias is added once anyway"
    if (rule.sections or rule.unit) and not cuts:
        yield "a unit or sections, and nothing that cuts", "add `style: colwise` or `shard: DIM`"
    if rule.sections and rule.unit:
        yield "`sections` and `unit`", "give the unit of each section: sections: [head, kv_head, kv_head]"
    if of_module and (shard or rule.once):
        said = "shard" if shard else "once"
        yield f"`{said}` beside what only a module has", "give inputs and attributes to the module's rule"
    if rule.parallel_residual and edges:
        yield "`parallel_residual` and `input` or `output`", "it prepares the input and the output by itself"
    if rule.below and rule.style != "replicate":
        yield "`below` without `replicate`", "name the modules that are cut one by one"
    if rule.like == "Embedding" and rule.style != "vocab":
        yield "`like` without `style: vocab`", "`like: Embedding` is for an embedding with a class of its own"
    if rule.like == "Linear" and rule.style not in ("colwise", "rowwise"):
        yield "`like: Linear` without `colwise` or `rowwise`", "it is for a linear layer with a class of its own"


def _todos(plan: Plan) -> Iterator[Diagnostic]:
    for rule in _as_written(plan):
        if rule.style == "todo":
            yield finding_at("DTP307", rule.at, f"`{rule.pattern}` is not decided", "replace `todo` by a style")


_TE_PARTS = {
    "LayerNormLinear": ("norm", "linears"),
    "Linear": ("linear",),
    "LayerNormMLP": ("norm", "up", "down", "activation"),
    "RMSNorm": ("norm",),
    "LayerNorm": ("norm",),
    "DotProductAttention": ("attention",),
}


def _te(plan: Plan, covered: Rules) -> Iterator[Diagnostic]:
    layers = plan.te + tuple(layer for variant in plan.variants for layer in variant.te)
    for layer in {layer.at: layer for layer in layers}.values():
        yield from _te_layer(layer, covered)


def _te_layer(layer: TeLayer, covered: Rules) -> Iterator[Diagnostic]:
    missing = [part for part in _TE_PARTS[layer.layer] if not getattr(layer, part)]
    if missing:
        hint = "name the modules that it replaces"
        yield finding_at("DTP305", layer.at, f"{layer.layer} lacks {', '.join(missing)}", hint)
    for role, part in layer.parts.items():
        path = (*layer.under, *part.split("."))
        if not any(covered.overlapping(path)):
            message = f"{layer.layer}: {role} `{'.'.join(path)}` has no rule"
            hint = "a fused layer replaces modules that the rules shard: correct the name, or add a rule"
            yield finding_at("DTP305", layer.at, message, hint)


def _ties(plan: Plan, covered: Rules) -> Iterator[Diagnostic]:
    for tie in plan.ties + tuple(tie for variant in plan.variants for tie in variant.ties):
        yield from _tie(tie, covered)


def _tie(tie: Tie, covered: Rules) -> Iterator[Diagnostic]:
    if len(tie.names) < 2:
        hint = "name both ends: [model.embed_tokens.weight, lm_head.weight]"
        yield finding_at("DTP306", tie.at, "a tie of fewer than two parameters", hint)
    for name in tie.names:
        path = tuple(name.split("."))
        if not any(covered.overlapping(path[:-1])) and not any(covered.overlapping(path)):
            hint = "a tie names parameters: model.embed_tokens.weight"
            yield finding_at("DTP306", tie.at, f"no rule covers `{name}`", hint)
