"""Units: what may be cut, how many there are in this model, and which degrees they allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtplan._errors import Diagnostic
from dtplan.plan.lint import units_of
from dtplan.plan.read import config_field
from dtplan.plan.source import finding_at
from dtplan.plan.spec import Plan, Rule, Unit
from dtplan.planner.bound import BoundUnit

_LARGEST_SHOWN = 64


def bound_units(
    plan: Plan, rules: Iterable[Rule], config: Any, tp: int
) -> tuple[dict[str, BoundUnit], list[Diagnostic]]:
    """The units that ``rules`` use with their counts in ``config``, and what is wrong with them at degree ``tp``."""
    used = {unit for rule in rules for unit in units_of(rule)}
    units: dict[str, BoundUnit] = {}
    findings: list[Diagnostic] = []
    for unit in plan.units.values():
        if unit.name in used:
            field, count = _count(unit, config)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                units[unit.name] = _bound(unit, field, count)
            else:
                findings.append(_no_count(unit, config))
    findings += _refusals(plan, units, tp)
    return units, findings


def _count(unit: Unit, config: Any) -> tuple[str, Any]:
    for field in unit.fields:
        value = config_field(config, field)
        if value is not None:
            return field, value
    return unit.fields[0], None


def _bound(unit: Unit, field: str, count: int) -> BoundUnit:
    if unit.indivisible == "uneven":
        allows = tuple(range(1, min(count, _LARGEST_SHOWN) + 1))
    elif unit.indivisible == "error":
        allows = tuple(d for d in range(1, _LARGEST_SHOWN + 1) if count % d == 0)
    elif unit.indivisible == "replicate_kv":
        allows = tuple(d for d in range(1, _LARGEST_SHOWN + 1) if count % d == 0 or d % count == 0)
    else:
        allows = tuple(range(1, _LARGEST_SHOWN + 1))
    return BoundUnit(name=unit.name, field=field, count=count, indivisible=unit.indivisible, allows=allows)


def _no_count(unit: Unit, config: Any) -> Diagnostic:
    fields = " or ".join(f"`{field}`" for field in unit.fields)
    kind = type(config).__name__ if config is not None else "no config"
    message = f"unit `{unit.name}` is counted by {fields}, and the model's config ({kind}) has no positive number there"
    return finding_at("DTP406", unit.at, message, "name the config field that holds the number of units")


def _refusals(plan: Plan, units: Mapping[str, BoundUnit], tp: int) -> list[Diagnostic]:
    """One finding for all units that refuse ``tp``: each one's own limit, then the degrees that all allow."""
    limiting = [unit for unit in units.values() if unit.indivisible in ("error", "replicate_kv")]
    refusing = [unit for unit in limiting if copies_of(unit, tp) == 0]
    if not refusing:
        return []
    limits = "; ".join(f"{u.name} = {u.count} ({u.field}) allows {_spell(u.allows)}" for u in limiting)
    allowed = set.intersection(*(set(unit.allows) for unit in units.values()))
    message = f"tensor_parallel_degree {tp} does not divide {', '.join(unit.name for unit in refusing)}: {limits}"
    hint = f"degrees that every unit allows: {_spell(sorted(allowed))}"
    return [finding_at("DTP405", plan.units[refusing[0].name].at, message, hint)]


def _spell(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def is_whole(unit: BoundUnit | None, tp: int) -> bool:
    """Whether modules cut in ``unit`` stay whole, because ``tp`` does not divide it and the plan says `replicate`."""
    return unit is not None and unit.indivisible == "replicate" and unit.count % tp != 0


def copies_of(unit: BoundUnit, tp: int) -> int:
    """How many neighbouring ranks keep one of the units: 1 where ``tp`` divides them, 0 where there is no way."""
    if unit.count % tp == 0 or unit.indivisible == "uneven":
        return 1
    return tp // unit.count if unit.indivisible == "replicate_kv" and tp % unit.count == 0 else 0
