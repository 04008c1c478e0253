"""Checks of a whole plan that need no model: what its parts say about each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from dtplan._errors import Diagnostic, did_you_mean
from dtplan.plan import paths
from dtplan.plan.source import finding_at
from dtplan.plan.spec import Plan, Rule, TeLayer, Tie, Unit


def findings_of(plan: Plan) -> tuple[Diagnostic, ...]:
    """Every finding, in the order of the file."""
    checks = (_overlaps, _units, _contradictions, _todos, _te, _ties)
    found = [finding for check in checks for finding in check(plan)]
    return tuple(sorted(found, key=lambda f: (f.file, f.line, f.column, f.code)))


def all_rules(plan: Plan) -> tuple[Rule, ...]:
    """The plan's rules and those of every variant."""
    return plan.rules + tuple(rule for variant in plan.variants for rule in variant.rules)


def _overlaps(plan: Plan) -> Iterator[Diagnostic]:
    groups = [plan.rules] + [plan.rules + variant.rules for variant in plan.variants]
    seen: set[tuple[object, object]] = set()
    for rules in groups:
        for first, second in itertools.combinations(rules, 2):
            key = (first.at, second.at)
            clash = paths.overlap(first.path, second.path) and first.override == second.override
            if clash and key not in seen:
                seen.add(key)
                message = f"`{second.pattern}` names what `{first.pattern}` names on {first.at.file}:{first.at.line}"
                yield finding_at("DTP301", second.at, message, "keep one, or mark the one that wins with `override: true`")


def _units(plan: Plan) -> Iterator[Diagnostic]:
    used = set()
    for rule in all_rules(plan):
        for unit in [rule.unit, *(section.unit for section in rule.sections)]:
            if unit is None:
                continue
            used.add(unit)
            if unit not in plan.units:
                hint = did_you_mean(unit, plan.units) or f"declared: {', '.join(plan.units) or 'none'}"
                yield finding_at("DTP302", rule.at, f"`{rule.pattern}` uses the unit `{unit}`, which is not declared", hint)
    for unit_ in plan.units.values():
        if unit_.name not in used and unit_.at.file == plan.files[0]:
            yield _unused(unit_)


def _unused(unit: Unit) -> Diagnostic:
    message = f"no rule uses the unit `{unit.name}`"
    return finding_at("DTP308", unit.at, message, "remove it, or give it to the rules that it limits: else it limits nothing")


def _contradictions(plan: Plan) -> Iterator[Diagnostic]:
    for rule in all_rules(plan):
        for message, hint in _rule_contradictions(rule):
            yield finding_at("DTP304", rule.at, f"`{rule.pattern}`: {message}", hint)


def _rule_contradictions(rule: Rule) -> Iterator[tuple[str, str]]:
    cuts = rule.style in ("colwise", "rowwise", "vocab", "sharded_norm") or rule.shard is not None
    if rule.style is not None and rule.shard is not None:
        yield "`style` and `shard` both say how it is cut", "a style is for a module, `shard` for a parameter or buffer"
    if rule.shard is not None and rule.grad == "sum":
        yield "`shard` and `grad: sum`", "a parameter that is cut has no partial gradient to sum"
    if rule.style in ("colwise", "rowwise", "vocab") and rule.grad == "sum":
        yield f"`style: {rule.style}` and `grad: sum`", "its parameters are cut; `grad: sum` is for whole ones"
    if (rule.sections or rule.unit) and not cuts:
        yield "a unit or sections without a style or `shard` that cuts", "add `style: colwise` or `shard: DIM`"
    if rule.sections and rule.unit:
        yield "`sections` and `unit`", "give the unit of each section: sections: [head, kv_head, kv_head]"
    if rule.parallel_residual and (rule.inputs or rule.outputs):
        yield "`parallel_residual` and `input` or `output`", "it prepares the input and the output by itself"


def _todos(plan: Plan) -> Iterator[Diagnostic]:
    for rule in all_rules(plan):
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


def _te(plan: Plan) -> Iterator[Diagnostic]:
    rules = all_rules(plan)
    for layer in plan.te + tuple(layer for variant in plan.variants for layer in variant.te):
        yield from _te_layer(layer, rules)


def _te_layer(layer: TeLayer, rules: Iterable[Rule]) -> Iterator[Diagnostic]:
    missing = [part for part in _TE_PARTS[layer.layer] if not getattr(layer, part)]
    if missing:
        yield finding_at("DTP305", layer.at, f"{layer.layer} lacks {', '.join(missing)}", "name the modules that it replaces")
    patterns = [rule.path for rule in rules]
    for role, part in layer.parts.items():
        path = (*layer.under, *part.split("."))
        if not any(paths.overlap(path, pattern) for pattern in patterns):
            message = f"{layer.layer}: {role} `{'.'.join(path)}` has no rule"
            yield finding_at("DTP305", layer.at, message, "a fused layer replaces modules that the rules shard")


def _ties(plan: Plan) -> Iterator[Diagnostic]:
    rules = all_rules(plan)
    for tie in plan.ties + tuple(tie for variant in plan.variants for tie in variant.ties):
        yield from _tie(tie, rules)


def _tie(tie: Tie, rules: Iterable[Rule]) -> Iterator[Diagnostic]:
    if len(tie.names) < 2:  # noqa: PLR2004 - a pair at least
        yield finding_at("DTP306", tie.at, "a tie of fewer than two parameters", "name both ends")
    for name in tie.names:
        path = tuple(name.split("."))
        if not any(paths.overlap(path[:-1], rule.path) or paths.overlap(path, rule.path) for rule in rules):
            yield finding_at("DTP306", tie.at, f"no rule covers `{name}`", "a tie names parameters, as model.embed_tokens.weight")
