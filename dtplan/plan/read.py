"""From a plan's name or file to a ``Plan``: versions, `extends`, and every finding in one run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from dtplan._errors import Diagnostic, PlanError, did_you_mean
from dtplan.plan import library
from dtplan.plan.grammar import PLAN
from dtplan.plan.lint import findings_of, findings_of_what_was_read
from dtplan.plan.paths import Segments
from dtplan.plan.source import Source, compose, compose_text, duplicate_keys
from dtplan.plan.spec import SEQUENCE, Plan, Rule, Variant
from dtplan.plan.syntax import Reading, shown

MAX_EXTENDS = 8


def load_plan(plan: str | Path | Plan) -> Plan:
    """Read a built-in plan by its name, or a plan file by its path.

    Raises:
        PlanError: with every finding of the run; the text gives ``file:line:column`` and a caret for each.
    """
    if isinstance(plan, Plan):
        return plan
    shipped = library.builtin_plans()
    if isinstance(plan, str) and plan in shipped:
        return _builtin(plan, max(file.stat().st_mtime_ns for file in shipped.values()))
    return _from_file(plan)


@functools.lru_cache(maxsize=128)
def _builtin(name: str, newest_ns: int) -> Plan:
    """Read once a process, unless a built-in is edited meanwhile: `auto` looks through all of them."""
    return _from_file(name)


def _from_file(plan: str | Path) -> Plan:
    path, shown_as = library.locate(plan)
    source, node = compose(path, shown_as)
    return _finish(source, node, path)


def parse_plan(text: str, file: str = "<text>") -> Plan:
    """As ``load_plan``, from text in memory; `extends` finds built-in plans only."""
    source, node = compose_text(text, file)
    return _finish(source, node, None)


def _finish(source: Source, node: yaml.MappingNode, path: Path | None) -> Plan:
    plan = _read(source, node, path, seen=())
    if findings := findings_of(plan):
        raise PlanError(findings)
    return plan


def _read(source: Source, node: yaml.MappingNode, path: Path | None, seen: tuple[Path, ...]) -> Plan:
    reading = Reading(source)
    for finding in duplicate_keys(source, node):
        reading.note(finding)
    values = PLAN.read(reading, node) or {}
    if other_version := [finding for finding in reading.findings if finding.code == "DTP204"]:
        raise PlanError(other_version)  # the rest would be judged by the wrong grammar
    base = _base(reading, values["extends"], path, seen) if "extends" in values else None
    own = _plan(values, source.file, "plan" if path is None else path.stem)
    if reading.findings:
        raise PlanError(_with_lint(reading.findings, own))
    return own if base is None else _extend(own, base, said=values.keys())


def _with_lint(findings: list[Diagnostic], own: Plan) -> list[Diagnostic]:
    """The findings of reading, and those of lint that do not follow from them."""
    taken = {(f.file, f.line, f.column) for f in findings}
    more = [f for f in findings_of_what_was_read(own) if (f.file, f.line, f.column) not in taken]
    return sorted([*findings, *more], key=lambda f: (f.file, f.line, f.column, f.code))


def _plan(values: Mapping[str, Any], file: str, default_name: str) -> Plan:
    given = {key: values[key] for key in ("serves", "variants", "ties", "names", "te", "fsdp") if key in values}
    return Plan(
        name=values.get("name", default_name),
        units=values.get("units", {}),
        rules=values.get("rules", ()),
        sequence_parallel=values.get("residual", SEQUENCE),
        files=(file,),
        **given,
    )


def _base(reading: Reading, extends: tuple[str, yaml.Node], path: Path | None, seen: tuple[Path, ...]) -> Plan | None:
    """The plan that `extends` names; None after noting what is wrong with it."""
    name, node = extends
    seen = seen if path is None else (*seen, path.resolve())
    try:
        if path is None and name not in library.builtin_plans():
            builtin = library.builtin_plans()
            hint = did_you_mean(name, builtin) or f"text in memory extends built-in plans only: {', '.join(builtin)}"
            reading.add("DTP303", node, f"`extends` names {shown(node)}, which is no built-in plan", hint)
            return None
        base_path, base_shown = library.locate(name, beside=path)
    except PlanError as error:
        (found,) = error.diagnostics
        reading.add("DTP303", node, f"`extends` names {shown(node)}: {found.message}", found.hint)
        return None
    if base_path.resolve() in seen or len(seen) > MAX_EXTENDS:
        chain = " -> ".join(step.name for step in (*seen, base_path))
        what = f"leads back to {base_shown}" if base_path.resolve() in seen else f"goes over {MAX_EXTENDS} plans"
        reading.add("DTP303", node, f"`extends` {what}", f"break the chain: {chain}")
        return None
    try:
        return _read(*compose(base_path, base_shown), base_path, seen)
    except PlanError as error:
        for finding in error.diagnostics:
            reading.note(finding)
        return None


def _extend(own: Plan, base: Plan, said: Collection[str]) -> Plan:
    """``base`` with what ``own`` says on top.

    Rules replace those of the same path, mappings are joined, and each other key that is ``said`` replaces
    the base's.
    """
    replaced = {rule.path for rule in own.rules}
    return Plan(
        name=own.name,
        serves=own.serves if "serves" in said else base.serves,
        units={**base.units, **own.units},
        sequence_parallel=own.sequence_parallel if "residual" in said else base.sequence_parallel,
        rules=_without(base.rules, replaced) + own.rules,
        variants=tuple(_variant_without(v, replaced, own.variants) for v in base.variants) + own.variants,
        ties=base.ties + own.ties,
        names={**base.names, **own.names},
        te=own.te if "te" in said else base.te,
        fsdp=own.fsdp if "fsdp" in said else base.fsdp,
        files=own.files + base.files,
    )


def _without(rules: tuple[Rule, ...], paths: Collection[Segments]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.path not in paths)


def _variant_without(variant: Variant, paths: set[Segments], own: tuple[Variant, ...]) -> Variant:
    """A base's variant without what the extending plan says itself, always or under the same `when`."""
    same = {rule.path for other in own if other.when == variant.when for rule in other.rules}
    return dataclasses.replace(variant, rules=_without(variant.rules, paths | same))


def rules_for(plan: Plan, config: Any) -> tuple[Rule, ...]:
    """The rules that hold for ``config``: the plan's own and those of the variants whose ``when`` is met."""
    active = [variant for variant in plan.variants if holds(variant.when, config)]
    return plan.rules + tuple(rule for variant in active for rule in variant.rules)


def holds(when: Any, config: Any) -> bool:
    """Whether every field has its value in ``config``; a field that is missing counts as None."""
    return all(_same(config_field(config, name), value) for name, value in when.items())


def _same(have: Any, want: Any) -> bool:
    return bool(have == want) and isinstance(have, bool) == isinstance(want, bool)  # to Python, 1 == True


def config_field(config: Any, name: str) -> Any:
    """The value at the dotted ``name``, or None where a step is missing."""
    for step in name.split("."):
        config = config.get(step) if isinstance(config, dict) else getattr(config, step, None)
    return config


def check(plan: str | Path) -> tuple[Diagnostic, ...]:
    """Every finding about a plan file; empty when there is none."""
    try:
        load_plan(plan)
    except PlanError as error:
        return error.diagnostics
    return ()
